// How the small-M kernel divides a multiply among CTAs: pure arithmetic, the same on host and device. The output is cut into tiles of 256
// columns (all tokens), the reduction of a tile into units of 256. Units are numbered tile by tile; a CTA takes a contiguous run of them.
//
//   tile        0             1             2
//   unit     0 1 2 3       4 5 6 7      8 9 10 11
//   CTA      0 0 0 1       1 1 2 2      2 3 3  3        a (CTA, tile) pair is a piece: one partial sum
#pragma once

namespace nybble::small_m {

constexpr int kUnit = 256;  // rows of W, and columns of W, of a unit

struct Work {
  int tiles = 0;
  int units = 0;  // of a tile
  int ctas = 0;   // at most tiles * units
};

// 32 bits hold ctas * (units of all tiles); supports_small_m_tiles() sees to it.
constexpr int first_unit(const Work& w, int cta) { return cta * (w.tiles * w.units) / w.ctas; }
constexpr int cta_of_unit(const Work& w, int unit) { return ((unit + 1) * w.ctas - 1) / (w.tiles * w.units); }
constexpr int first_cta(const Work& w, int tile) { return cta_of_unit(w, tile * w.units); }
constexpr int last_cta(const Work& w, int tile) { return cta_of_unit(w, (tile + 1) * w.units - 1); }

// Where the piece of a tile that a CTA sums is stored. Along the run of pieces CTA or tile goes up, so no two share a slot.
constexpr int slot_of_piece(int cta, int tile) { return cta + tile; }
constexpr int slots(const Work& w) { return w.ctas + w.tiles - 1; }

}  // namespace nybble::small_m
