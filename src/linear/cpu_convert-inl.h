// Rows of bf16, fp16 and fp32 at any address, to and from fp32, compiled once per Highway target.

#if defined(NYBBLE_LINEAR_CPU_CONVERT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#  ifdef NYBBLE_LINEAR_CPU_CONVERT_INL_H_
#    undef NYBBLE_LINEAR_CPU_CONVERT_INL_H_
#  else
#    define NYBBLE_LINEAR_CPU_CONVERT_INL_H_
#  endif

#  include "format/rounding.h"
#  include "linear/cpu_decode-inl.h"

HWY_BEFORE_NAMESPACE();
namespace nybble::cpu::HWY_NAMESPACE {

// out[i] = in[first + i]
template <DType DTYPE>
HWY_INLINE void load_row(const void* in, int64_t first, int64_t count, float* HWY_RESTRICT out) {
  if constexpr (DTYPE == DType::kFloat32) {
    std::memcpy(out, static_cast<const uint8_t*>(in) + first * 4, static_cast<size_t>(count) * 4);
    return;
  }
  const Floats d;
  const hn::Rebind<uint16_t, Floats> dh;
  const uint8_t* source = static_cast<const uint8_t*>(in) + first * 2;
  int64_t i = 0;
  if constexpr (DTYPE == DType::kBFloat16) {
    for (; i + kLanes <= count; i += kLanes) {
      const auto bits = hn::PromoteTo(Ints(), hn::LoadU(dh, reinterpret_cast<const uint16_t*>(source + 2 * i)));
      hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(bits)), d, out + i);
    }
  }
  for (; i < count; i++) out[i] = format::load_as_float(source, DTYPE, i);
}

// out[first + i] = values[i], rounded.
template <DType DTYPE>
HWY_INLINE void store_row(const float* HWY_RESTRICT values, int64_t first, int64_t count, void* out) {
  if constexpr (DTYPE == DType::kFloat32) {
    std::memcpy(static_cast<uint8_t*>(out) + first * 4, values, static_cast<size_t>(count) * 4);
    return;
  }
  const Floats d;
  const hn::Rebind<uint16_t, Floats> dh;
  uint8_t* target = static_cast<uint8_t*>(out) + first * 2;
  int64_t i = 0;
  if constexpr (DTYPE == DType::kBFloat16) {
    for (; i + kLanes <= count; i += kLanes) {
      const auto bits = hn::ShiftRight<16>(hn::BitCast(Ints(), round_to<DTYPE>(d, hn::LoadU(d, values + i))));
      hn::StoreU(hn::DemoteTo(dh, hn::BitCast(hn::RebindToSigned<Ints>(), bits)), dh, reinterpret_cast<uint16_t*>(target + 2 * i));
    }
  }
  for (; i < count; i++) {
    const uint16_t half = DTYPE == DType::kFloat16 ? format::to_fp16(values[i]) : format::to_bf16(values[i]);
    std::memcpy(target + 2 * i, &half, sizeof half);
  }
}

}  // namespace nybble::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // NYBBLE_LINEAR_CPU_CONVERT_INL_H_
