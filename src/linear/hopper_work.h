// How the Hopper kernel divides a multiply among clusters: pure arithmetic, the same on host and device. The output is cut into tiles of
// 128 rows by (2 x tile tokens) tokens, the reduction of a tile into steps of 64.
#pragma once

#include <cstdint>

namespace nybble::hopper {

constexpr int kTileRows = 128;
constexpr int kStep = 64;          // reduction columns a step
constexpr int kMaxPieces = 8;      // of one tile
constexpr int kSpareSegments = 4;  // of a cluster's list: the pieces of a stream-K range, the end marker

// One launch. Clusters take tiles round-robin; what does not fill the clusters evenly is divided in one of two ways.
struct Work {
  int row_tiles = 0;
  int token_tiles = 0;
  int tiles = 0;  // row_tiles * token_tiles
  int steps = 0;  // of a tile, a multiple of unit
  int unit = 4;   // segments are cut at multiples of it
  int clusters = 0;
  int group = 1;         // token tiles that are walked before the next row tile: they share the packed rows in L2
  int stream_tiles = 0;  // tiles [0, stream_tiles) are one long range of steps, cut evenly at any unit (stream-K)
  int pieces = 1;        // > 1: each tile of the last, partial wave is cut into so many pieces of its reduction
};

// A run of steps of one tile. end = 0: no more work.
struct Segment {
  int begin = 0;
  int end = 0;
  int row_tile = 0;
  int token_tile = 0;
};

// Start of a cluster's part of the stream-K range, in steps. 32 bits hold clusters^2 * 2 * steps / unit.
constexpr int stream_begin(const Work& w, int cluster) {
  const unsigned units = static_cast<unsigned>(w.stream_tiles) * static_cast<unsigned>(w.steps / w.unit);
  return static_cast<int>(static_cast<unsigned>(cluster) * units / static_cast<unsigned>(w.clusters)) * w.unit;
}

constexpr int piece_begin(const Work& w, int piece) { return piece * (w.steps / w.unit) / w.pieces * w.unit; }

// A piece finishes the chunks [first_chunk(piece), first_chunk(piece + 1)) of its tile's output; with more pieces than chunks some have
// none.
constexpr int first_chunk(const Work& w, int piece, int chunks) { return (piece * chunks + w.pieces - 1) / w.pieces; }

// End, in steps of the stream-K range, of the last tile that a cluster has a part of.
constexpr int last_tile_end(const Work& w, int cluster) { return ((stream_begin(w, cluster + 1) - 1) / w.steps + 1) * w.steps; }

// First tile of the last wave when that is cut into pieces.
constexpr int first_cut_tile(const Work& w) { return w.pieces > 1 ? w.tiles / w.clusters * w.clusters : w.tiles; }

// The segments of one cluster, in order: pieces of its stream-K range, whole tiles, at most one last piece. The end of a stream-K range
// comes last: it holds the start of a tile whose later steps other clusters stored at the very start of the launch, so nobody waits for it.
struct Share {
  int range_begin = 0, range_end = 0, range_segments = 0;
  int first_tile = 0, whole_tiles = 0;
  int last_tile = -1, last_begin = 0, last_end = 0;
};

constexpr Share share_of(const Work& w, int cluster) {
  Share s;
  const int whole_end = first_cut_tile(w);
  const int cut = cluster / w.pieces;
  if (cut < w.tiles - whole_end) {
    s.last_tile = whole_end + cut;
    s.last_begin = piece_begin(w, cluster % w.pieces);
    s.last_end = piece_begin(w, cluster % w.pieces + 1);
  }
  if (w.stream_tiles > 0) {
    s.range_begin = stream_begin(w, cluster);
    s.range_end = stream_begin(w, cluster + 1);
    const int boundary = s.range_end / w.steps * w.steps;
    if (boundary > s.range_begin && boundary < s.range_end) {
      s.last_tile = boundary / w.steps;
      s.last_end = s.range_end - boundary;
      s.range_end = boundary;
    }
    if (s.range_end > s.range_begin) s.range_segments = (s.range_end - 1) / w.steps - s.range_begin / w.steps + 1;
  }
  s.first_tile = w.stream_tiles + cluster;
  if (s.first_tile < whole_end) s.whole_tiles = (whole_end - s.first_tile + w.clusters - 1) / w.clusters;
  return s;
}

// Segment i of a cluster. Tiles are numbered token tile first inside a group, then by row tile, then by group.
constexpr Segment segment_of(const Work& w, const Share& s, int i) {
  Segment g;
  int tile = 0;
  g.end = w.steps;
  if (i < s.range_segments) {
    tile = s.range_begin / w.steps + i;
    const int first = tile * w.steps;
    if (i == 0) g.begin = s.range_begin - first;
    if (s.range_end - first < w.steps) g.end = s.range_end - first;
  } else if (i < s.range_segments + s.whole_tiles) {
    tile = s.first_tile + (i - s.range_segments) * w.clusters;
  } else if (i == s.range_segments + s.whole_tiles && s.last_tile >= 0) {
    tile = s.last_tile;
    g.begin = s.last_begin;
    g.end = s.last_end;
  } else {
    return Segment{};
  }
  const int group_tiles = w.group * w.row_tiles, first_token_tile = tile / group_tiles * w.group, index = tile % group_tiles;
  const int width = w.token_tiles - first_token_tile < w.group ? w.token_tiles - first_token_tile : w.group;
  g.row_tile = index / width;
  g.token_tile = first_token_tile + index % width;
  return g;
}

}  // namespace nybble::hopper
