// The 16 values that the weights of a block can take: computed and rounded once a block, exactly as dequantize_4bit rounds, and kept as
// byte planes, so that 16-byte table look-ups turn codes into weights. Compiled once per Highway target.
//
//   table of a block, bf16:  [low bytes of the 16 values][high bytes]        32 bytes
//   fp16 and fp32:           [byte 0][byte 1][byte 2][byte 3] of the fp32     64 bytes

#if defined(NYBBLE_LINEAR_CPU_TABLES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#  ifdef NYBBLE_LINEAR_CPU_TABLES_INL_H_
#    undef NYBBLE_LINEAR_CPU_TABLES_INL_H_
#  else
#    define NYBBLE_LINEAR_CPU_TABLES_INL_H_
#  endif

#  include <hwy/highway.h>

#  include <bit>
#  include <cstring>

#  include "format/rounding.h"
#  include "nybble/format.h"

HWY_BEFORE_NAMESPACE();
namespace nybble::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Decoding works on at most 256 bits: wider vectors gain nothing where memory bounds it, and so the order of one row's sums is the same on
// every target.
using Bytes = hn::CappedTag<uint8_t, 32>;
using Words = hn::Repartition<uint16_t, Bytes>;
using Ints = hn::Repartition<uint32_t, Bytes>;
using Floats = hn::Repartition<float, Bytes>;
using Block = hn::FixedTag<uint8_t, 16>;
using VBytes = hn::Vec<Bytes>;
using VFloats = hn::Vec<Floats>;

constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(Floats()));  // 8 or 4
constexpr bool k256 = kLanes == 8;
constexpr int64_t kGroup = 32;  // consecutive weights, from a multiple of 32, that share a block for sure

template <DType DTYPE>
constexpr int kPlanes = DTYPE == DType::kBFloat16 ? 2 : 4;
template <DType DTYPE>
constexpr int64_t kTableBytes = 16 * kPlanes<DTYPE>;

// Scales in this range make finite products that are zero or normal: no flushing, no NaN. The least code above 0 is FP4's 0.0052.
constexpr float kLeastPlainScale = 0x1p-118f;
constexpr float kGreatestScale = 0x1.fffffep127f;

// To the nearest value of DTYPE, ties to even. NaN stays NaN unless the caller knows that there is none.
template <DType DTYPE, bool NAN_FREE = false, class D, class V = hn::Vec<D>>
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
  if constexpr (NAN_FREE) return hn::BitCast(d, rounded);
  return hn::IfThenElse(hn::Eq(value, value), hn::BitCast(d, rounded), hn::Set(d, std::bit_cast<float>(0x7FFFE000u)));
}

// fp32 subnormals become a zero of their sign, as the GPU's ftz arithmetic does.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V flush(D d, V value) {
  return hn::IfThenElse(hn::Lt(hn::Abs(value), hn::Set(d, 0x1p-126f)), hn::CopySign(hn::Zero(d), value), value);
}

// format::multiply_flushed(a, b) for operands that are not subnormal.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V multiply_flushed(D d, V a, V b) {
  const V product = hn::Mul(a, b), scaled = hn::Mul(hn::Mul(a, hn::Set(d, format::kTinyScale)), b);
  return hn::IfThenElse(hn::Lt(hn::Abs(scaled), hn::Set(d, format::kTinyBound)), hn::CopySign(hn::Zero(d), product), product);
}

// The table of a block from its 16 values, in kLanes-wide vectors of fp32.
template <DType DTYPE>
HWY_INLINE void store_table(const VFloats (&values)[16 / kLanes], uint8_t* HWY_RESTRICT table) {
  const Floats d;
  const Block d8;
  if constexpr (k256 && kPlanes<DTYPE> == 2) {
    // Two bf16 to an int, value 8 + t below value t; bytes sorted within 128 bits, then ints across.
    alignas(32) static constexpr uint8_t kSort[32] = {2, 6, 10, 14, 0, 4, 8, 12, 3, 7, 11, 15, 1, 5, 9, 13,
                                                      2, 6, 10, 14, 0, 4, 8, 12, 3, 7, 11, 15, 1, 5, 9, 13};
    alignas(32) static constexpr int32_t kGather[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    const auto upper = hn::BitCast(Words(), hn::ShiftRight<16>(hn::BitCast(Ints(), values[1])));
    const auto both = hn::BitCast(Bytes(), hn::OddEven(hn::BitCast(Words(), values[0]), upper));
    const auto sorted = hn::BitCast(Ints(), hn::TableLookupBytes(both, hn::Load(Bytes(), kSort)));
    const auto planes = hn::TableLookupLanes(sorted, hn::SetTableIndices(Ints(), kGather));
    hn::StoreU(hn::BitCast(Bytes(), planes), Bytes(), table);
    return;
  }
  alignas(64) uint8_t bytes[16 * sizeof(float)];
  NYBBLE_UNROLL
  for (int i = 0; i < 16 / kLanes; i++) hn::Store(values[i], d, reinterpret_cast<float*>(bytes) + i * kLanes);
  hn::Vec<Block> p0, p1, p2, p3;
  hn::LoadInterleaved4(d8, bytes, p0, p1, p2, p3);
  if constexpr (kPlanes<DTYPE> == 2) {
    hn::StoreU(p2, d8, table);
    hn::StoreU(p3, d8, table + 16);
  } else {
    hn::StoreU(p0, d8, table);
    hn::StoreU(p1, d8, table + 16);
    hn::StoreU(p2, d8, table + 32);
    hn::StoreU(p3, d8, table + 48);
  }
}

// The tables of `count` blocks. codes: the 16 values of the quant type, code 8 of FP4 as -0. PLAIN: all scales are in the range above.
template <DType DTYPE, bool PLAIN>
HWY_INLINE void build_tables(const float* HWY_RESTRICT scales, int64_t count, const float* HWY_RESTRICT codes,
                             uint8_t* HWY_RESTRICT tables) {
  const Floats d;
  VFloats code[16 / kLanes];
  NYBBLE_UNROLL
  for (int i = 0; i < 16 / kLanes; i++) code[i] = hn::LoadU(d, codes + i * kLanes);
  for (int64_t block = 0; block < count; block++) {
    VFloats scale = hn::Set(d, scales[block]);
    if constexpr (!PLAIN) scale = flush(d, scale);
    VFloats values[16 / kLanes];
    NYBBLE_UNROLL
    for (int i = 0; i < 16 / kLanes; i++) {
      values[i] = PLAIN ? round_to<DTYPE, true>(d, hn::Mul(code[i], scale)) : round_to<DTYPE>(d, multiply_flushed(d, code[i], scale));
    }
    store_table<DTYPE>(values, tables + block * kTableBytes<DTYPE>);
  }
}

// A weight as the decoder sees it; holds the tables that all blocks share.
struct Source {
  explicit Source(const Nf4Weight& w)
      : weight(w), packed_size(packed_bytes(w.n * w.k)), block_shift(std::countr_zero(static_cast<uint32_t>(w.block_size))) {
    const auto table = code_table(w.quant_type);
    std::memcpy(codes, table.data(), sizeof codes);
    if (w.quant_type == QuantType::kFp4) codes[8] = -0.0f;
    fast_nested = w.scales.nested() && w.scales.nested_dtype == DType::kFloat32 && w.n * w.k > 0;
    if (!fast_nested) return;
    offset = format::load<float>(w.scales.offset, 0);
    for (int i = 0; i < 256; i++) nested_code[i] = format::flush(format::load<float>(w.scales.nested_code, i));
  }

  // The scales of blocks [first, first + count), as expand_scales gives them; writes up to a whole vector.
  HWY_INLINE void scales_of(int64_t first, int64_t count, float* HWY_RESTRICT out) const {
    if (!fast_nested) return expand_scales(weight.scales, first, count, out);
    const Floats d;
    const hn::Rebind<int32_t, Floats> di;
    for (int64_t i = 0; i < count;) {
      const int64_t stop = HWY_MIN(count, ((first + i) / kNestedBlockSize + 1) * kNestedBlockSize - first);
      const float nested = format::flush(format::load<float>(weight.scales.nested_absmax, (first + i) / kNestedBlockSize));
      const uint8_t* source = weight.scales.absmax_codes + first;
      for (; i < stop; i += kLanes) {
        uint8_t bytes[8] = {};
        std::memcpy(bytes, source + i, static_cast<size_t>(HWY_MIN(kLanes, stop - i)));
        const auto index = hn::PromoteTo(di, hn::LoadU(hn::Rebind<uint8_t, Floats>(), bytes));
        const VFloats product = multiply_flushed(d, hn::GatherIndex(d, nested_code, index), hn::Set(d, nested));
        hn::StoreU(hn::Add(product, hn::Set(d, offset)), d, out + i);
      }
      i = stop;
    }
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
  bool fast_nested;
  float offset = 0;
  float codes[16];
  float nested_code[256];
};

// Tables of the blocks that hold weights [first, first + count), count <= CAPACITY.
template <DType DTYPE, int64_t CAPACITY>
class Tables {
 public:
  HWY_INLINE void build(const Source& source, int64_t first, int64_t count) {
    const Floats d;
    shift_ = source.block_shift;
    first_ = first >> shift_;
    const int64_t blocks = ((first + count - 1) >> shift_) - first_ + 1;
    source.scales_of(first_, blocks, scales_);
    for (int64_t i = blocks; i < blocks + kLanes; i++) scales_[i] = 1.0f;
    auto plain = hn::FirstN(d, static_cast<size_t>(kLanes));
    for (int64_t i = 0; i < blocks; i += kLanes) {
      const VFloats size = hn::Abs(hn::LoadU(d, scales_ + i));
      plain = hn::And(plain, hn::And(hn::Ge(size, hn::Set(d, kLeastPlainScale)), hn::Le(size, hn::Set(d, kGreatestScale))));
    }
    if (hn::AllTrue(d, plain)) {
      build_tables<DTYPE, true>(scales_, blocks, source.codes, tables_);
    } else {
      build_tables<DTYPE, false>(scales_, blocks, source.codes, tables_);
    }
  }
  HWY_INLINE const uint8_t* of(int64_t weight_index) const { return tables_ + ((weight_index >> shift_) - first_) * kTableBytes<DTYPE>; }

 private:
  static constexpr int64_t kBlocks = CAPACITY / kMinBlockSize + 2;
  int shift_ = 0;
  int64_t first_ = 0;
  alignas(64) float scales_[kBlocks + 2 * kLanes];
  alignas(64) uint8_t tables_[kBlocks * kTableBytes<DTYPE>];
};

}  // namespace nybble::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // NYBBLE_LINEAR_CPU_TABLES_INL_H_
