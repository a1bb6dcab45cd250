// 4-bit codes to fp32, compiled once per Highway target. The weights of a block can take 16 values only: they are computed and rounded once
// a block (exactly as dequantize_4bit rounds) and kept as byte planes, so that 16-byte table look-ups turn codes into weights.
//
//   table of a block, bf16:  [low bytes of the 16 values][high bytes]        32 bytes
//   fp16 and fp32:           [byte 0][byte 1][byte 2][byte 3] of the fp32     64 bytes

#if defined(NYBBLE_LINEAR_CPU_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#  ifdef NYBBLE_LINEAR_CPU_DECODE_INL_H_
#    undef NYBBLE_LINEAR_CPU_DECODE_INL_H_
#  else
#    define NYBBLE_LINEAR_CPU_DECODE_INL_H_
#  endif

#  include <hwy/highway.h>

#  include <bit>
#  include <cstring>

#  include "nybble/format.h"

HWY_BEFORE_NAMESPACE();
namespace nybble::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Decoding works on at most 256 bits: wider vectors gain nothing where memory bounds it, and so the lane order of one row is the same on
// every target.
using Bytes = hn::CappedTag<uint8_t, 32>;
using Words = hn::Repartition<uint16_t, Bytes>;
using Ints = hn::Repartition<uint32_t, Bytes>;
using Floats = hn::Repartition<float, Bytes>;
using Block = hn::FixedTag<uint8_t, 16>;
using VBytes = hn::Vec<Bytes>;
using VFloats = hn::Vec<Floats>;

constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(Floats()));  // 8 or 4
constexpr int64_t kRun = 64;                                              // weights decoded together: two groups of 32
constexpr int64_t kGroup = 32;                                            // consecutive weights that share a block for sure
constexpr int kSteps = kLanes == 8 ? 1 : 2;                               // vectors of codes in a run

template <DType DTYPE>
constexpr int kPlanes = DTYPE == DType::kBFloat16 ? 2 : 4;
template <DType DTYPE>
constexpr int64_t kTableBytes = 16 * kPlanes<DTYPE>;

// To the nearest value of DTYPE, ties to even; NaN stays NaN.
template <DType DTYPE, class D, class V = hn::Vec<D>>
HWY_INLINE V round_to(D d, V value) {
  if constexpr (DTYPE == DType::kFloat32) return value;
  const hn::RebindToUnsigned<D> di;
  const auto bits = hn::BitCast(di, value);
  constexpr int kDropped = DTYPE == DType::kBFloat16 ? 16 : 13;
  const auto odd = hn::And(hn::ShiftRight<kDropped>(bits), hn::Set(di, 1u));
  auto rounded = hn::Add(hn::Add(bits, hn::Set(di, (1u << (kDropped - 1)) - 1)), odd);
  rounded = hn::And(rounded, hn::Set(di, ~((1u << kDropped) - 1)));
  if constexpr (DTYPE == DType::kFloat16) {
    const V size = hn::Abs(value);
    // Below 2^-14 the unit of fp16 is 2^-24, the last place of 0.5 + size.
    const V half = hn::Set(d, 0.5f);
    const auto tiny = hn::BitCast(di, hn::CopySign(hn::Sub(hn::Add(size, half), half), value));
    const auto infinity = hn::BitCast(di, hn::CopySign(hn::Set(d, std::bit_cast<float>(0x7F800000u)), value));
    rounded = hn::IfThenElse(hn::RebindMask(di, hn::Lt(size, hn::Set(d, 0x1p-14f))), tiny, rounded);
    rounded = hn::IfThenElse(hn::RebindMask(di, hn::Ge(size, hn::Set(d, 65520.0f))), infinity, rounded);
  }
  return hn::IfThenElse(hn::Eq(value, value), hn::BitCast(d, rounded), hn::Set(d, std::bit_cast<float>(0x7FFFE000u)));
}

// fp32 subnormals become a zero of their sign, as the GPU's ftz arithmetic does.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V flush(D d, V value) {
  return hn::IfThenElse(hn::Lt(hn::Abs(value), hn::Set(d, 0x1p-126f)), hn::CopySign(hn::Zero(d), value), value);
}

// The tables of `count` blocks. codes: the 16 values of the quant type, code 8 of FP4 as -0.
template <DType DTYPE>
HWY_INLINE void build_tables(const float* HWY_RESTRICT scales, int64_t count, const float* HWY_RESTRICT codes,
                             uint8_t* HWY_RESTRICT tables) {
  const Floats d;
  const Block d8;
  alignas(64) uint8_t values[16 * sizeof(float)];
  for (int64_t block = 0; block < count; block++) {
    const VFloats scale = flush(d, hn::Set(d, scales[block]));
    uint8_t* table = tables + block * kTableBytes<DTYPE>;
    for (int64_t i = 0; i < 16; i += kLanes) {
      const VFloats value = round_to<DTYPE>(d, flush(d, hn::Mul(hn::LoadU(d, codes + i), scale)));
      if constexpr (kPlanes<DTYPE> == 2) {
        const hn::Rebind<uint16_t, Floats> dh;
        const hn::Rebind<int32_t, Floats> di;
        const auto words = hn::DemoteTo(dh, hn::BitCast(di, hn::ShiftRight<16>(hn::BitCast(Ints(), value))));
        hn::StoreU(words, dh, reinterpret_cast<uint16_t*>(values) + i);
      } else {
        hn::StoreU(value, d, reinterpret_cast<float*>(values) + i);
      }
    }
    hn::Vec<Block> p0, p1;
    if constexpr (kPlanes<DTYPE> == 2) {
      hn::LoadInterleaved2(d8, values, p0, p1);
    } else {
      hn::Vec<Block> p2, p3;
      hn::LoadInterleaved4(d8, values, p0, p1, p2, p3);
      hn::StoreU(p2, d8, table + 32);
      hn::StoreU(p3, d8, table + 48);
    }
    hn::StoreU(p0, d8, table);
    hn::StoreU(p1, d8, table + 16);
  }
}

// Decodes one vector of codes. Vector j of out holds weights 4 j .. 4 j + 3 of each group of 32; the first group has table a, the second
// (where a vector holds two) table b.
template <DType DTYPE>
HWY_INLINE void decode_step(const uint8_t* HWY_RESTRICT codes, const uint8_t* HWY_RESTRICT a, const uint8_t* HWY_RESTRICT b,
                            VFloats (&out)[8]) {
  constexpr int kCount = kPlanes<DTYPE>;
  const Bytes d8;
  const Words d16;
  const Floats d;
  VBytes planes[kCount];
  NYBBLE_UNROLL
  for (int p = 0; p < kCount; p++) {
    if constexpr (kSteps == 1) {
      const hn::Half<Bytes> dh;
      planes[p] = hn::Combine(d8, hn::LoadU(dh, b + 16 * p), hn::LoadU(dh, a + 16 * p));
    } else {
      planes[p] = hn::LoadU(d8, a + 16 * p);
    }
  }
  const VBytes pairs = hn::LoadU(d8, codes);
  const VBytes even = hn::ShiftRight<4>(pairs);
  const VBytes odd = hn::And(pairs, hn::Set(d8, 15));
  NYBBLE_UNROLL
  for (int half = 0; half < 2; half++) {
    const VBytes index = half == 0 ? hn::InterleaveLower(d8, even, odd) : hn::InterleaveUpper(d8, even, odd);
    VBytes bytes[kCount];
    NYBBLE_UNROLL
    for (int p = 0; p < kCount; p++) bytes[p] = hn::TableLookupBytes(planes[p], index);
    NYBBLE_UNROLL
    for (int quarter = 0; quarter < 2; quarter++) {
      const auto weave = [&](const VBytes& low, const VBytes& high) HWY_ATTR {
        return hn::BitCast(d16, quarter == 0 ? hn::InterleaveLower(d8, low, high) : hn::InterleaveUpper(d8, low, high));
      };
      const auto high = weave(bytes[kCount - 2], bytes[kCount - 1]);
      auto low = hn::Zero(d16);
      if constexpr (kCount == 4) low = weave(bytes[0], bytes[1]);
      out[4 * half + 2 * quarter] = hn::BitCast(d, hn::InterleaveLower(d16, low, high));
      out[4 * half + 2 * quarter + 1] = hn::BitCast(d, hn::InterleaveUpper(d16, low, high));
    }
  }
}

// A run of 64 weights in their own order.
template <DType DTYPE>
HWY_INLINE void decode_run(const uint8_t* HWY_RESTRICT codes, const uint8_t* HWY_RESTRICT a, const uint8_t* HWY_RESTRICT b,
                           float* HWY_RESTRICT out) {
  const Floats d;
  VFloats v[8];
  NYBBLE_UNROLL
  for (int step = 0; step < kSteps; step++) {
    decode_step<DTYPE>(codes + 16 * step, step == 0 ? a : b, b, v);
    NYBBLE_UNROLL
    for (int j = 0; j < 8; j++) {
      if constexpr (kSteps == 1) {
        if (j % 2 == 1) continue;
        hn::StoreU(hn::ConcatLowerLower(d, v[j + 1], v[j]), d, out + 4 * j);
        hn::StoreU(hn::ConcatUpperUpper(d, v[j + 1], v[j]), d, out + kGroup + 4 * j);
      } else {
        hn::StoreU(v[j], d, out + kGroup * step + 4 * j);
      }
    }
  }
}

// A weight as the decoder sees it.
struct Source {
  explicit Source(const Nf4Weight& w)
      : weight(w), packed_size(packed_bytes(w.n * w.k)), block_shift(std::countr_zero(static_cast<uint32_t>(w.block_size))) {
    const auto table = code_table(w.quant_type);
    std::memcpy(codes, table.data(), sizeof codes);
    if (w.quant_type == QuantType::kFp4) codes[8] = -0.0f;
  }

  // Copies the 16 bytes of the group that holds `weight_index` without reading past the end.
  void copy_group(int64_t weight_index, uint8_t* out) const {
    const int64_t byte = weight_index / kGroup * (kGroup / 2);
    std::memset(out, 0, kGroup / 2);
    std::memcpy(out, weight.packed + byte, static_cast<size_t>(HWY_MIN(kGroup / 2, packed_size - byte)));
  }

  const Nf4Weight& weight;
  int64_t packed_size;
  int block_shift;
  float codes[16];
};

// Tables of the blocks that hold weights [first, first + count), count <= CAPACITY.
template <DType DTYPE, int64_t CAPACITY>
class Tables {
 public:
  HWY_INLINE void build(const Source& source, int64_t first, int64_t count) {
    shift_ = source.block_shift;
    first_ = first >> shift_;
    const int64_t blocks = ((first + count - 1) >> shift_) - first_ + 1;
    expand_scales(source.weight.scales, first_, blocks, scales_);
    build_tables<DTYPE>(scales_, blocks, source.codes, tables_);
  }
  const uint8_t* of(int64_t weight_index) const { return tables_ + ((weight_index >> shift_) - first_) * kTableBytes<DTYPE>; }

 private:
  static constexpr int64_t kBlocks = CAPACITY / kMinBlockSize + 2;
  int shift_ = 0;
  int64_t first_ = 0;
  alignas(64) float scales_[kBlocks];
  alignas(64) uint8_t tables_[kBlocks * kTableBytes<DTYPE>];
};

// out = weights [first, first + count) of the flattened weight, whose tables were built; any first.
template <DType DTYPE, int64_t CAPACITY>
HWY_INLINE void decode_with(const Source& source, int64_t first, int64_t count, const Tables<DTYPE, CAPACITY>& tables,
                            float* HWY_RESTRICT out) {
  const int64_t end = first + count;
  for (int64_t i = first; i < end;) {
    const int64_t skipped = i % kGroup;
    if (skipped == 0 && end - i >= kRun) {
      decode_run<DTYPE>(source.weight.packed + i / 2, tables.of(i), tables.of(i + kGroup), out);
      i += kRun;
      out += kRun;
      continue;
    }
    uint8_t group[kRun / 2] = {};
    float weights[kRun];
    source.copy_group(i, group);
    decode_run<DTYPE>(group, tables.of(i), tables.of(i), weights);
    const int64_t taken = HWY_MIN(kGroup - skipped, end - i);
    std::memcpy(out, weights + skipped, static_cast<size_t>(taken) * sizeof(float));
    i += taken;
    out += taken;
  }
}

}  // namespace nybble::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // NYBBLE_LINEAR_CPU_DECODE_INL_H_
