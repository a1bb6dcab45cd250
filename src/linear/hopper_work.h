// How the Hopper kernel divides a multiply among clusters: pure arithmetic, the same on host and device. The output is cut into tiles of
// 128 rows by (2 x tile tokens) tokens, the reduction of a tile into steps of 64.
#pragma once

#include "linear/divider.h"

namespace nybble::hopper {

constexpr int kTileRows = 128;
constexpr int kStep = 64;          // reduction columns a step
constexpr int kMaxPieces = 8;      // of one tile
constexpr int kMaxClusters = 72;   // of a launch, two multiprocessors each: a whole GH100
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

  // What follows from these, for the device.
  int units = 0;                                                                      // of a tile
  int whole_end = 0;                                                                  // first tile that is cut into pieces, or tiles
  Divider by_steps, by_clusters, by_pieces, by_group_tiles, by_group, by_last_width;  // width: of the last group, in token tiles
};
constexpr void derive(Work& w) {
  w.units = w.steps / w.unit;
  w.whole_end = w.pieces > 1 ? w.tiles / w.clusters * w.clusters : w.tiles;
  w.by_steps = Divider(w.steps);
  w.by_clusters = Divider(w.clusters);
  w.by_pieces = Divider(w.pieces);
  w.by_group_tiles = Divider(w.group * w.row_tiles);
  w.by_group = Divider(w.group);
  w.by_last_width = Divider((w.token_tiles - 1) % w.group + 1);
}

// A run of steps of one tile. end = 0: no more work.
struct Segment {
  int begin = 0;
  int end = 0;
  int row_tile = 0;
  int token_tile = 0;
};

// Start of a cluster's part of the stream-K range, in steps. 31 bits hold clusters^2 * 2 * units.
constexpr int stream_begin(const Work& w, int cluster) { return w.by_clusters.quotient(cluster * w.stream_tiles * w.units) * w.unit; }

constexpr int piece_begin(const Work& w, int piece) { return w.by_pieces.quotient(piece * w.units) * w.unit; }

// A piece finishes the chunks [first_chunk(piece), first_chunk(piece + 1)) of its tile's output; with more pieces than chunks some have
// none.
constexpr int first_chunk(const Work& w, int piece, int chunks) { return w.by_pieces.quotient(piece * chunks + w.pieces - 1); }

// End, in steps of the stream-K range, of the last tile that a cluster has a part of.
constexpr int last_tile_end(const Work& w, int cluster) { return (w.by_steps.quotient(stream_begin(w, cluster + 1) - 1) + 1) * w.steps; }

// The segments of one cluster, in order: pieces of its stream-K range, whole tiles, at most one last piece. The end of a stream-K range
// comes last: it holds the start of a tile whose later steps other clusters stored at the very start of the launch, so nobody waits for it.
struct Share {
  int range_begin = 0, range_end = 0, range_segments = 0;
  int first_tile = 0, whole_tiles = 0;
  int last_tile = -1, last_begin = 0, last_end = 0;
};

constexpr Share share_of(const Work& w, int cluster) {
  Share s;
  const int cut = w.by_pieces.quotient(cluster), piece = w.by_pieces.remainder(cluster);
  if (cut < w.tiles - w.whole_end) {
    s.last_tile = w.whole_end + cut;
    s.last_begin = piece_begin(w, piece);
    s.last_end = piece_begin(w, piece + 1);
  }
  if (w.stream_tiles > 0) {
    s.range_begin = stream_begin(w, cluster);
    s.range_end = stream_begin(w, cluster + 1);
    const int end_tile = w.by_steps.quotient(s.range_end), boundary = end_tile * w.steps;
    if (boundary > s.range_begin && boundary < s.range_end) {
      s.last_tile = end_tile;
      s.last_end = s.range_end - boundary;
      s.range_end = boundary;
    }
    if (s.range_end > s.range_begin) s.range_segments = w.by_steps.quotient(s.range_end - 1) - w.by_steps.quotient(s.range_begin) + 1;
  }
  s.first_tile = w.stream_tiles + cluster;
  if (s.first_tile < w.whole_end) s.whole_tiles = w.by_clusters.quotient(w.whole_end - s.first_tile + w.clusters - 1);
  return s;
}

// Segment i of a cluster. Tiles are numbered token tile first inside a group, then by row tile, then by group.
constexpr Segment segment_of(const Work& w, const Share& s, int i) {
  Segment g;
  int tile = 0;
  g.end = w.steps;
  if (i < s.range_segments) {
    tile = w.by_steps.quotient(s.range_begin) + i;
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
  const int group = w.by_group_tiles.quotient(tile), index = w.by_group_tiles.remainder(tile), left = w.token_tiles - group * w.group;
  g.row_tile = (left < w.group ? w.by_last_width : w.by_group).quotient(index);
  g.token_tile = group * w.group + index - g.row_tile * (left < w.group ? left : w.group);
  return g;
}

}  // namespace nybble::hopper
