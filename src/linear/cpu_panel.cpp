// The CPU multiply for any number of rows: a GEMM whose second operand is decoded into cache as it goes.
//
//   out[m][o] = sum over r of in[m][r] * w(o, r)      forward: o = n, r = k       grad_x: o = k, r = n
//
// A task owns up to kOutputs outputs and all rows of one row block. For each chain of kChain values of r it decodes a panel of W to fp32
// (L2), then slides tiles of the packed activation (L1) over it. The activation is packed once a row block, as fp32, rows interleaved
// across vector lanes, so that one weight is broadcast and multiplied with many rows: every sum is a chain of its own and no width changes
// its order.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "linear/cpu_panel.cpp"
#include <hwy/aligned_allocator.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <atomic>

#include "core/parallel.h"
#include "linear/cpu_paths.h"
#include "linear/cpu_targets.h"
#if HWY_TARGET != HWY_SCALAR
#  include "linear/cpu_convert-inl.h"
#  include "linear/cpu_decode-inl.h"
#else
#  include "linear/cpu_plain-inl.h"
#endif

#ifndef NYBBLE_LINEAR_CPU_PANEL_CONSTANTS_
#  define NYBBLE_LINEAR_CPU_PANEL_CONSTANTS_
namespace nybble::cpu {

constexpr int64_t kOutputs = 192;                      // a panel: 192 x 256 fp32 = 204 KiB, within an L2 of 512 KiB beside the sums
constexpr int64_t kRowBlock = 512;                     // rows packed at a time: decoding once for 512 rows costs about 1% of their products
constexpr int64_t kPadding = 16;                       // an odd number of cache lines from panel row to panel row: all sets of L1 are used
constexpr int64_t kMaxPanelBytes = int64_t{32} << 20;  // decoded W of all threads together

// One task's panel is at a fixed pitch, [outputs][chain] in the forward and [chain][outputs] in grad_x: both as W lies in memory.
template <Direction DIRECTION>
constexpr int64_t kPitch = (DIRECTION == Direction::kForward ? kChain : kOutputs) + kPadding;
constexpr int64_t kPanelFloats = std::max(kOutputs * (kChain + kPadding), kChain*(kOutputs + kPadding));

}  // namespace nybble::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace nybble::cpu::HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR
namespace {

using Wide = hn::ScalableTag<float>;
using VWide = hn::Vec<Wide>;
constexpr int64_t kWide = static_cast<int64_t>(hn::MaxLanes(Wide()));
constexpr bool kManyRegisters = HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM;  // 32, not 16
constexpr int kTallRows = 12;                                            // outputs of a tile one vector of rows wide
constexpr int kBroadRows = kManyRegisters ? 12 : 6;                      // of a tile two vectors wide

using Buffer = hwy::AlignedFreeUniquePtr<float[]>;
Buffer allocate(int64_t count) {
  Buffer buffer = hwy::AllocateAligned<float>(static_cast<size_t>(count));
  if (!buffer) throw std::bad_alloc();
  return buffer;
}

// The rows of a row block in tiles of two vectors; a last tile of one vector where that is enough.
struct Tiling {
  explicit Tiling(int64_t rows) : rows(rows), tiles((rows + 2 * kWide - 1) / (2 * kWide)) {}
  int64_t width(int64_t tile) const { return rows - tile * 2 * kWide > kWide ? 2 * kWide : kWide; }
  int64_t padded() const { return (tiles - 1) * 2 * kWide + width(tiles - 1); }
  int64_t rows;
  int64_t tiles;
};

template <Direction DIRECTION>
constexpr int64_t panel_offset(int64_t output, int64_t r) {
  return DIRECTION == Direction::kForward ? output * kPitch<DIRECTION> + r : r * kPitch<DIRECTION> + output;
}

// sums[OUTPUTS][VECTORS * kWide] (+)= one chain. w: panel at its first output; x: packed activation [depth][VECTORS * kWide].
template <Direction DIRECTION, int OUTPUTS, int VECTORS>
HWY_INLINE void multiply_tile(const float* HWY_RESTRICT w, const float* HWY_RESTRICT x, int64_t depth, float* HWY_RESTRICT sums,
                              bool first) {
  const Wide d;
  VWide chain[OUTPUTS][VECTORS];
#  pragma GCC unroll 16
  for (int o = 0; o < OUTPUTS; o++) {
#  pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) chain[o][v] = hn::Zero(d);
  }
  for (int64_t r = 0; r < depth; r++) {
    VWide rows[VECTORS];
#  pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) rows[v] = hn::Load(d, x + (r * VECTORS + v) * kWide);
#  pragma GCC unroll 16
    for (int o = 0; o < OUTPUTS; o++) {
      const VWide weight = hn::Set(d, w[panel_offset<DIRECTION>(o, r)]);
#  pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) chain[o][v] = hn::MulAdd(weight, rows[v], chain[o][v]);
    }
  }
#  pragma GCC unroll 16
  for (int o = 0; o < OUTPUTS; o++) {
#  pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) {
      float* sum = sums + (o * VECTORS + v) * kWide;
      hn::Store(first ? chain[o][v] : hn::Add(hn::Load(d, sum), chain[o][v]), d, sum);
    }
  }
}

// Everything a task reads. packed: [tile][reduction][width].
struct Shared {
  const LinearProblem& problem;
  const LinearArgs& args;
  int64_t first_row;
  Tiling tiling;
  int64_t outputs;
  int64_t reduction;
  int64_t panel;  // outputs of a task
  const float* packed;
};

template <Direction DIRECTION>
struct Scratch {
  explicit Scratch(const Shared& shared) : w(allocate(kPanelFloats)), sums(allocate(shared.tiling.padded() * kOutputs)) {
    std::fill_n(w.get(), kPanelFloats, 0.0f);  // outputs that only fill up a tile are multiplied too
  }
  Buffer w;
  Buffer sums;  // [tile][kOutputs][width]
};

template <DType DTYPE>
void pack_rows(const Shared& s, int64_t tile, float* packed) {
  const int64_t width = s.tiling.width(tile);
  const int64_t first = tile * 2 * kWide;
  const int64_t count = std::min(width, s.tiling.rows - first);
  float* out = packed + first * s.reduction;
  float row[kChain];
  for (int64_t r = 0; r < s.reduction; r += kChain) {
    const int64_t depth = std::min(kChain, s.reduction - r);
    for (int64_t lane = 0; lane < width; lane++) {
      if (lane < count) {
        load_row<DTYPE>(s.args.in, (s.first_row + first + lane) * s.args.in_row_stride + r, depth, row);
      } else {
        std::fill_n(row, depth, 0.0f);
      }
      for (int64_t i = 0; i < depth; i++) out[(r + i) * width + lane] = row[i];
    }
  }
}

template <DType DTYPE, Direction DIRECTION>
void decode_panel(const Shared& s, const Source& source, int64_t output, int64_t outputs, int64_t r, int64_t depth, float* w) {
  constexpr bool kForward = DIRECTION == Direction::kForward;
  Tables<DTYPE, kChain> tables;
  const int64_t rows = kForward ? outputs : depth;
  const int64_t columns = kForward ? depth : outputs;
  const int64_t first = (kForward ? output : r) * s.problem.k + (kForward ? r : output);
  for (int64_t i = 0; i < rows; i++) {
    tables.build(source, first + i * s.problem.k, columns);
    decode_with(source, first + i * s.problem.k, columns, tables, w + i * kPitch<DIRECTION>);
  }
}

template <Direction DIRECTION>
void multiply_panel(const Shared& s, int64_t outputs, int64_t r, int64_t depth, Scratch<DIRECTION>& scratch) {
  for (int64_t tile = 0; tile < s.tiling.tiles; tile++) {
    const int64_t width = s.tiling.width(tile);
    const float* x = s.packed + tile * 2 * kWide * s.reduction + r * width;
    float* sums = scratch.sums.get() + tile * 2 * kWide * kOutputs;
    if (width == kWide) {
      for (int64_t o = 0; o < outputs; o += kTallRows) {
        multiply_tile<DIRECTION, kTallRows, 1>(scratch.w.get() + panel_offset<DIRECTION>(o, 0), x, depth, sums + o * width, r == 0);
      }
    } else {
      for (int64_t o = 0; o < outputs; o += kBroadRows) {
        multiply_tile<DIRECTION, kBroadRows, 2>(scratch.w.get() + panel_offset<DIRECTION>(o, 0), x, depth, sums + o * width, r == 0);
      }
    }
  }
}

template <DType DTYPE>
void store_outputs(const Shared& s, int64_t output, int64_t outputs, const float* sums) {
  float bias[kOutputs] = {};
  if (s.problem.bias) load_row<DTYPE>(s.args.bias, output, outputs, bias);
  float row[kOutputs];
  for (int64_t m = 0; m < s.tiling.rows; m++) {
    const int64_t tile = m / (2 * kWide);
    const int64_t width = s.tiling.width(tile);
    const float* from = sums + tile * 2 * kWide * kOutputs + m % (2 * kWide);
    for (int64_t o = 0; o < outputs; o++) row[o] = from[o * width];
    if (s.problem.bias) {
      for (int64_t o = 0; o < outputs; o++) row[o] += bias[o];
    }
    store_row<DTYPE>(row, (s.first_row + m) * s.outputs + output, outputs, s.args.out);
  }
}

template <DType DTYPE, Direction DIRECTION>
void run_tasks(const Shared& s) {
  const Source source(s.args.weight);
  const int64_t tasks = (s.outputs + s.panel - 1) / s.panel;
  const int64_t workers = std::min<int64_t>(num_threads(), tasks);
  std::atomic<int64_t> next{0};
  parallel_for(workers, 1, [&](int64_t, int64_t) {
    if (next >= tasks) return;
    Scratch<DIRECTION> scratch(s);
    if (s.reduction == 0) std::fill_n(scratch.sums.get(), s.tiling.padded() * kOutputs, 0.0f);
    for (int64_t task = next++; task < tasks; task = next++) {
      const int64_t output = task * s.panel;
      const int64_t outputs = std::min(s.panel, s.outputs - output);
      for (int64_t r = 0; r < s.reduction; r += kChain) {
        const int64_t depth = std::min(kChain, s.reduction - r);
        decode_panel<DTYPE, DIRECTION>(s, source, output, outputs, r, depth, scratch.w.get());
        multiply_panel<DIRECTION>(s, outputs, r, depth, scratch);
      }
      store_outputs<DTYPE>(s, output, outputs, scratch.sums.get());
    }
  });
}

// Small enough that all threads have work and that their panels together stay below kMaxPanelBytes.
int64_t panel_outputs(int64_t outputs) {
  const int64_t threads = num_threads();
  const int64_t share = (outputs + 4 * threads - 1) / (4 * threads);
  const int64_t limit = kMaxPanelBytes / (kChain * static_cast<int64_t>(sizeof(float)) * threads);
  const int64_t wanted = std::min(std::max<int64_t>(share, 48), std::max<int64_t>(limit, kTallRows));
  return std::clamp<int64_t>(wanted / kTallRows * kTallRows, kTallRows, kOutputs);
}

template <DType DTYPE>
void multiply_all(const LinearProblem& problem, const LinearArgs& args) {
  const bool forward = problem.direction == Direction::kForward;
  Shared s{problem, args,   0, Tiling(std::min(problem.m, kRowBlock)), forward ? problem.n : problem.k, forward ? problem.k : problem.n,
           0,       nullptr};
  s.panel = panel_outputs(s.outputs);
  const Buffer packed = allocate(s.tiling.padded() * std::max<int64_t>(s.reduction, 1));
  s.packed = packed.get();
  for (; s.first_row < problem.m; s.first_row += kRowBlock) {
    s.tiling = Tiling(std::min(kRowBlock, problem.m - s.first_row));
    parallel_for(s.tiling.tiles, 1, [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; tile++) pack_rows<DTYPE>(s, tile, packed.get());
    });
    if (forward) {
      run_tasks<DTYPE, Direction::kForward>(s);
    } else {
      run_tasks<DTYPE, Direction::kGradInput>(s);
    }
  }
}

}  // namespace

void run_panels(const LinearProblem& problem, const LinearArgs& args) {
  switch (problem.dtype) {
    case DType::kBFloat16:
      return multiply_all<DType::kBFloat16>(problem, args);
    case DType::kFloat16:
      return multiply_all<DType::kFloat16>(problem, args);
    case DType::kFloat32:
      return multiply_all<DType::kFloat32>(problem, args);
  }
}
#else
void run_panels(const LinearProblem& problem, const LinearArgs& args) { plain_multiply(problem, args); }
#endif

}  // namespace nybble::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace nybble::cpu {
HWY_EXPORT(run_panels);
void multiply_panels(const LinearProblem& problem, const LinearArgs& args) { HWY_DYNAMIC_DISPATCH(run_panels)(problem, args); }
}  // namespace nybble::cpu
#endif
