// How the strip kernel divides a multiply: pure arithmetic, the same on host and device. W is cut into strips of 16 rows and slices of 256
// columns; a strip of a slice is an item, 2 KB packed. A CTA takes a contiguous run of strips in groups that its shared memory has room
// for, and all slices (of its range, where columns are cut into ranges to keep all SMs busy): warp w takes slices w, w + 16, ... Slices
// beyond a multiple of 16 are shared: as many warps as there are for each, which take the CTA's strips in turn. Who adds what does not
// depend on the size of a group.
//
//   20 slices    warp     0  1  2  3  4  5 ...15
//   round 0      slice    0  1  2  3  4  5 ...15       all strips
//   round 1      slice   16 16 16 16 17 17 ...19       strips 0 4 8 ..., 1 5 9 ..., 2 6 ..., 3 7 ..., 0 4 8 ...
#pragma once

#include "linear/divider.h"

namespace nybble::small_m::strip {

constexpr int kStripRows = 16, kSliceColumns = 256, kWarps = 16, kStages = 3;
constexpr int kUnitRows = kWarps * 16;  // grad_x
constexpr int kItemBytes = kStripRows * kSliceColumns / 2;

struct Work {
  int strips = 0;         // of W
  int slices = 0;         // of a range
  int ranges = 1;         // of columns, whose sums another kernel adds; a power of two
  int strips_of_cta = 0;  // of the last CTA of a range perhaps fewer
  int group = 0;          // strips at once
  // grad_x
  int bands = 0;  // of 256 columns
  int units = 0;  // of a band, kUnitRows rows each
  int ctas = 1;
  // Made by with_dividers()
  int range_bits = 0;                   // log2(ranges)
  Divider by_sharers, by_code_vectors;  // warps that share a slice; 16 bytes of codes of a row
  int run = 0, longer_runs = 0;         // units of a CTA, and how many CTAs have one more
  Divider by_units, by_ctas;
};

// The same with what follows from it.
constexpr Work with_dividers(Work w) {
  while (1 << w.range_bits < w.ranges) w.range_bits++;
  if (w.slices % kWarps > 0) w.by_sharers = Divider(kWarps / (w.slices % kWarps));
  if (w.slices >= 4) w.by_code_vectors = Divider(w.slices / 4);
  const int units = w.bands * w.units;
  if (units > 0) w.run = units / w.ctas, w.longer_runs = units % w.ctas, w.by_units = Divider(w.units), w.by_ctas = Divider(w.ctas);
  return w;
}

constexpr int rounds(const Work& w) { return (w.slices + kWarps - 1) / kWarps; }

// What a warp does in a round: one slice, of the strips low, low + step ... below high.
struct Part {
  int slice = 0, low = 0, high = 0, step = 1;
};
// Of the strips [low, high) of a CTA.
constexpr Part part_of(const Work& w, int warp, int round, int low, int high) {
  const int full = w.slices / kWarps;
  if (round < full) return {round * kWarps + warp, low, high, 1};
  const int sharers = static_cast<int>(w.by_sharers.divisor), slice = w.by_sharers.quotient(warp);
  if (full * kWarps + slice >= w.slices) return {};
  return {full * kWarps + slice, low + w.by_sharers.remainder(warp - slice * sharers + sharers - w.by_sharers.remainder(low)), high,
          sharers};
}
constexpr int items_of(const Work& w, const Part& part) {
  if (part.high <= part.low) return 0;
  return part.step == 1 ? part.high - part.low : w.by_sharers.quotient(part.high - part.low + part.step - 1);
}

// grad_x: units are numbered band by band; a CTA takes units [first_unit(cta), first_unit(cta + 1)).
constexpr int first_unit(const Work& w, int cta) { return cta * w.run + w.by_ctas.quotient(cta * w.longer_runs); }
constexpr int cta_of_unit(const Work& w, int unit) {
  return static_cast<int>(((unit + int64_t{1}) * w.ctas - 1) / (static_cast<int64_t>(w.bands) * w.units));
}

// Forward, of a group in shared memory. Rows of absmax codes, 4 blocks a word, so far apart that eight rows share few banks, and 16 bytes
// stay aligned where slices come in fours.
constexpr int code_row_words(int slices) { return slices % 4 == 0 ? slices + 4 : slices | 1; }
constexpr int64_t sum_bytes(int group) { return int64_t{kWarps} * group * 512; }
constexpr int64_t code_bytes(int group, int slices) { return int64_t{group} * kStripRows * code_row_words(slices) * 4; }
constexpr int64_t nested_bytes(int group, const Work& w) { return (int64_t{group} * kStripRows * w.slices * w.ranges / 64 + 2) * 4; }
constexpr int64_t group_bytes(int group, const Work& w) { return sum_bytes(group) + code_bytes(group, w.slices) + nested_bytes(group, w); }

}  // namespace nybble::small_m::strip
