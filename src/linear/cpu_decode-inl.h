// 4-bit codes to fp32 by look-ups in the tables of cpu_tables-inl.h. Compiled once per Highway target.

#if defined(NYBBLE_LINEAR_CPU_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#  ifdef NYBBLE_LINEAR_CPU_DECODE_INL_H_
#    undef NYBBLE_LINEAR_CPU_DECODE_INL_H_
#  else
#    define NYBBLE_LINEAR_CPU_DECODE_INL_H_
#  endif

#  include "linear/cpu_tables-inl.h"

HWY_BEFORE_NAMESPACE();
namespace nybble::cpu::HWY_NAMESPACE {

constexpr int64_t kRun = 64;          // weights decoded together in places: two groups
constexpr int kSteps = k256 ? 1 : 2;  // vectors of codes in a run

template <int PLANES>
HWY_INLINE VFloats weave(const VBytes (&bytes)[PLANES], bool upper_bytes, bool upper_words) {
  const Bytes d8;
  const Words d16;
  const auto pair = [&](const VBytes& low, const VBytes& high) HWY_ATTR {
    return hn::BitCast(d16, upper_bytes ? hn::InterleaveUpper(d8, low, high) : hn::InterleaveLower(d8, low, high));
  };
  const auto high = pair(bytes[PLANES - 2], bytes[PLANES - 1]);
  auto low = hn::Zero(d16);
  if constexpr (PLANES == 4) low = pair(bytes[0], bytes[1]);
  return hn::BitCast(Floats(), upper_words ? hn::InterleaveUpper(d16, low, high) : hn::InterleaveLower(d16, low, high));
}

// out[0 .. 32) = the weights of a group, in order. codes: its 16 bytes.
template <DType DTYPE>
HWY_INLINE void decode_group(const uint8_t* HWY_RESTRICT codes, const uint8_t* HWY_RESTRICT table, float* HWY_RESTRICT out) {
  constexpr int kCount = kPlanes<DTYPE>;
  const Bytes d8;
  const Floats d;
  VBytes index[32 / (kLanes * 4)];
  if constexpr (k256) {
    // Weights 0-3, 8-11, 16-19, 24-27 to the lower 128 bits, the others to the upper: after two interleavings a vector holds 8 in order.
    alignas(32) static constexpr uint8_t kSpread[32] = {0, 0, 1, 1, 4, 4, 5, 5, 8,  8,  9,  9,  12, 12, 13, 13,
                                                        2, 2, 3, 3, 6, 6, 7, 7, 10, 10, 11, 11, 14, 14, 15, 15};
    const Words d16;
    const auto twice = hn::BitCast(d16, hn::TableLookupBytes(hn::LoadDup128(d8, codes), hn::Load(d8, kSpread)));
    const auto even = hn::And(hn::ShiftRight<4>(twice), hn::Set(d16, 0x000F));
    index[0] = hn::BitCast(d8, hn::Or(even, hn::And(twice, hn::Set(d16, 0x0F00))));
  } else {
    const VBytes pairs = hn::LoadU(d8, codes);
    const VBytes even = hn::ShiftRight<4>(pairs);
    const VBytes odd = hn::And(pairs, hn::Set(d8, 15));
    index[0] = hn::InterleaveLower(d8, even, odd);
    index[32 / (kLanes * 4) - 1] = hn::InterleaveUpper(d8, even, odd);
  }
  NYBBLE_UNROLL
  for (int i = 0; i < 32 / (kLanes * 4); i++) {
    VBytes bytes[kCount];
    NYBBLE_UNROLL
    for (int p = 0; p < kCount; p++) bytes[p] = hn::TableLookupBytes(hn::LoadDup128(d8, table + 16 * p), index[i]);
    NYBBLE_UNROLL
    for (int v = 0; v < 4; v++) hn::StoreU(weave(bytes, v / 2 == 1, v % 2 == 1), d, out + (4 * i + v) * kLanes);
  }
}

// Place p of a run of 64 in the output of decode_places: vector 4 h + q of a group holds its weights 16 h + q, + 4, + 8, + 12; the vectors
// of the two groups lie side by side in 256 bits, one after the other in 128.
constexpr int64_t decoded_place(int64_t p) {
  const int64_t group = p / kGroup;
  const int64_t vector = p % kGroup / 16 * 4 + p % 4;
  const int64_t lane = p % 16 / 4;
  return k256 ? vector * 8 + group * 4 + lane : group * kGroup + vector * 4 + lane;
}

// One vector of codes to 8 vectors of weights, in the cheapest order. Tables a and b: of the first and the second group in the vector; ONE:
// they are the same.
template <DType DTYPE, bool ONE>
HWY_INLINE void decode_places(const uint8_t* HWY_RESTRICT codes, const uint8_t* HWY_RESTRICT a, const uint8_t* HWY_RESTRICT b,
                              VFloats (&out)[8]) {
  constexpr int kCount = kPlanes<DTYPE>;
  const Bytes d8;
  const Ints d32;
  const Floats d;
  VBytes planes[kCount];
  NYBBLE_UNROLL
  for (int p = 0; p < kCount; p++) {
    if constexpr (k256 && !ONE) {
      const hn::Half<Bytes> dh;
      planes[p] = hn::Combine(d8, hn::LoadU(dh, b + 16 * p), hn::LoadU(dh, a + 16 * p));
    } else {
      planes[p] = hn::LoadDup128(d8, a + 16 * p);
    }
  }
  const VBytes pairs = hn::LoadU(d8, codes);
  NYBBLE_UNROLL
  for (int odd = 0; odd < 2; odd++) {
    VBytes index = odd == 0 ? hn::ShiftRight<4>(pairs) : hn::And(pairs, hn::Set(d8, 15));
    if constexpr (kCount == 4) {
      alignas(16) static constexpr uint8_t kApart[16] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
      index = hn::TableLookupBytes(index, hn::LoadDup128(d8, kApart));
    }
    VBytes bytes[kCount];
    NYBBLE_UNROLL
    for (int p = 0; p < kCount; p++) bytes[p] = hn::TableLookupBytes(planes[p], index);
    NYBBLE_UNROLL
    for (int h = 0; h < 2; h++) {
      if constexpr (kCount == 4) {
        out[4 * h + odd] = weave(bytes, h == 1, false);
        out[4 * h + odd + 2] = weave(bytes, h == 1, true);
      } else {
        const auto words =
            hn::BitCast(d32, h == 0 ? hn::InterleaveLower(d8, bytes[0], bytes[1]) : hn::InterleaveUpper(d8, bytes[0], bytes[1]));
        out[4 * h + odd] = hn::BitCast(d, hn::ShiftLeft<16>(words));
        out[4 * h + odd + 2] = hn::BitCast(d, hn::And(words, hn::Set(d32, 0xFFFF0000u)));
      }
    }
  }
}

// out = weights [first, first + count) of the flattened weight, whose tables were built; any first.
template <DType DTYPE, int64_t CAPACITY>
HWY_INLINE void decode_with(const Source& source, int64_t first, int64_t count, const Tables<DTYPE, CAPACITY>& tables,
                            float* HWY_RESTRICT out) {
  const int64_t end = first + count;
  for (int64_t i = first; i < end;) {
    const int64_t skipped = i % kGroup;
    if (skipped == 0 && end - i >= kGroup) {
      decode_group<DTYPE>(source.weight.packed + i / 2, tables.of(i), out);
      i += kGroup;
      out += kGroup;
      continue;
    }
    uint8_t codes[kGroup / 2];
    float weights[kGroup];
    source.copy_group(i, codes);
    decode_group<DTYPE>(codes, tables.of(i), weights);
    const int64_t taken = HWY_MIN(kGroup - skipped, end - i);
    std::memcpy(out, weights + skipped, static_cast<size_t>(taken) * sizeof(float));
    i += taken;
    out += taken;
  }
}

}  // namespace nybble::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // NYBBLE_LINEAR_CPU_DECODE_INL_H_
