// The CPU multiply for any number of rows: a GEMM whose second operand is decoded into cache as it goes.
//
//   out[m][o] = sum over r of in[m][r] * w(o, r)      forward: o = n, r = k       grad_x: o = k, r = n
//
// A task owns a range of outputs and all rows of one row block. For each chain of kChain values of r it decodes a panel of W to fp32 (L2),
// then slides tiles of the packed activation (L1) over it. The activation is packed once a row block, as fp32, rows interleaved across
// vector lanes, so that one weight is broadcast and multiplied with many rows: every sum is a chain of its own and no width changes its
// order.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "linear/cpu_panel.cpp"
// The targets are chosen before Highway is seen:
// clang-format off
#include "linear/cpu_targets.h"
#include <hwy/foreach_target.h>
// clang-format on
#include <hwy/aligned_allocator.h>
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <atomic>

#include "core/parallel.h"
#include "linear/cpu_paths.h"
#if HWY_TARGET != HWY_SCALAR
#  include "linear/cpu_convert-inl.h"
#  include "linear/cpu_decode-inl.h"
#else
#  include "linear/cpu_plain-inl.h"
#endif

#ifndef NYBBLE_LINEAR_CPU_PANEL_CONSTANTS_
#  define NYBBLE_LINEAR_CPU_PANEL_CONSTANTS_
namespace nybble::cpu {

constexpr int64_t kRowBlock = 512;                     // rows packed at a time: decoding once for 512 rows costs about 1% of their products
constexpr int64_t kPadding = 16;                       // an odd number of cache lines from panel row to panel row: all sets of L1 are used
constexpr int64_t kMaxPanelBytes = int64_t{32} << 20;  // decoded W of all threads together
constexpr int64_t kBatch = 8;  // panel rows whose tables are built together (their latencies overlap), and fetched ahead

// A panel lies as W does in memory, [outputs][chain] in the forward and [chain][outputs] in grad_x, and fills about half an L2 of 512 KiB.
// A task of the forward is one panel wide. One of grad_x is several: the panels of a chain share pages and cache lines.
template <Direction DIRECTION>
constexpr int64_t kPanel = DIRECTION == Direction::kForward ? 192 : 256;  // outputs
template <Direction DIRECTION>
constexpr int64_t kTask = DIRECTION == Direction::kForward ? 192 : 1024;  // outputs
template <Direction DIRECTION>
constexpr int64_t kPitch = (DIRECTION == Direction::kForward ? kChain : kPanel<DIRECTION>)+kPadding;
template <Direction DIRECTION>
constexpr int64_t kPanelFloats = (DIRECTION == Direction::kForward ? kPanel<DIRECTION> : kChain) * kPitch<DIRECTION>;

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
// Outputs of a tile by its width in vectors of rows; kRest of them end a panel where no more are left.
template <int VECTORS>
constexpr int kOutputs = VECTORS == 1 || kManyRegisters ? 12 : 6;
constexpr int kRest = 4;

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
  int64_t task;  // outputs of a task
  const float* packed;
};

template <Direction DIRECTION>
struct Scratch {
  static constexpr int64_t kSumOutputs = kTask<DIRECTION> + kOutputs<1>;  // a last tile may reach past the task
  explicit Scratch(const Shared& shared)
      : w(allocate(kPanelFloats<DIRECTION> + kOutputs<1>)), sums(allocate(shared.tiling.padded() * kSumOutputs)) {
    std::fill_n(w.get(), kPanelFloats<DIRECTION> + kOutputs<1>, 0.0f);
    if (shared.reduction == 0) std::fill_n(sums.get(), shared.tiling.padded() * kSumOutputs, 0.0f);
  }
  Buffer w;
  Buffer sums;  // [tile][kSumOutputs][width]
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

// Rows of a panel lie far apart and are short: no hardware prefetcher follows them.
HWY_INLINE void prefetch(const Source& source, int64_t first, int64_t count) {
  const int64_t end = std::min((first + count + 1) / 2, source.packed_size);
  for (int64_t byte = first / 2; byte < end; byte += 64) hwy::Prefetch(source.weight.packed + byte);
}

template <DType DTYPE, Direction DIRECTION>
void decode_panel(const Shared& s, const Source& source, int64_t output, int64_t outputs, int64_t r, int64_t depth, float* w) {
  constexpr bool kForward = DIRECTION == Direction::kForward;
  Tables<DTYPE, kChain> tables[kBatch];
  const int64_t rows = kForward ? outputs : depth;
  const int64_t columns = kForward ? depth : outputs;
  const int64_t pitch = s.problem.k;
  const int64_t first = (kForward ? output : r) * pitch + (kForward ? r : output);
  for (int64_t i = 0; i < rows; i += kBatch) {
    const int64_t stop = std::min(rows, i + kBatch);
    for (int64_t j = i; j < stop; j++) {
      prefetch(source, first + (j + kBatch) * pitch, columns);
      tables[j - i].build(source, first + j * pitch, columns);
    }
    for (int64_t j = i; j < stop; j++) decode_with(source, first + j * pitch, columns, tables[j - i], w + j * kPitch<DIRECTION>);
  }
}

// sums: of the panel's first output.
template <Direction DIRECTION, int VECTORS>
HWY_INLINE void multiply_tiles(const float* w, int64_t outputs, const float* x, int64_t depth, float* sums, bool first) {
  constexpr int kStep = kOutputs<VECTORS>;
  int64_t o = 0;
  for (; o + kRest < outputs; o += kStep) {
    multiply_tile<DIRECTION, kStep, VECTORS>(w + panel_offset<DIRECTION>(o, 0), x, depth, sums + o * VECTORS * kWide, first);
  }
  if (o < outputs) multiply_tile<DIRECTION, kRest, VECTORS>(w + panel_offset<DIRECTION>(o, 0), x, depth, sums + o * VECTORS * kWide, first);
}

template <Direction DIRECTION>
void multiply_panel(const Shared& s, int64_t begin, int64_t outputs, int64_t r, int64_t depth, Scratch<DIRECTION>& scratch) {
  for (int64_t tile = 0; tile < s.tiling.tiles; tile++) {
    const int64_t width = s.tiling.width(tile);
    const float* x = s.packed + tile * 2 * kWide * s.reduction + r * width;
    float* sums = scratch.sums.get() + tile * 2 * kWide * scratch.kSumOutputs + begin * width;
    if (width == kWide) {
      multiply_tiles<DIRECTION, 1>(scratch.w.get(), outputs, x, depth, sums, r == 0);
    } else {
      multiply_tiles<DIRECTION, 2>(scratch.w.get(), outputs, x, depth, sums, r == 0);
    }
  }
}

template <DType DTYPE, Direction DIRECTION>
void store_outputs(const Shared& s, int64_t output, int64_t outputs, const Scratch<DIRECTION>& scratch) {
  float bias[kTask<DIRECTION>];
  float row[kTask<DIRECTION>];
  if (s.problem.bias) load_row<DTYPE>(s.args.bias, output, outputs, bias);
  for (int64_t m = 0; m < s.tiling.rows; m++) {
    const int64_t tile = m / (2 * kWide);
    const int64_t width = s.tiling.width(tile);
    const float* from = scratch.sums.get() + tile * 2 * kWide * scratch.kSumOutputs + m % (2 * kWide);
    for (int64_t o = 0; o < outputs; o++) row[o] = from[o * width];
    if (s.problem.bias) {
      for (int64_t o = 0; o < outputs; o++) row[o] += bias[o];
    }
    store_row<DTYPE>(row, (s.first_row + m) * s.outputs + output, outputs, s.args.out);
  }
}

template <DType DTYPE, Direction DIRECTION>
void run_task(const Shared& s, const Source& source, int64_t output, int64_t outputs, Scratch<DIRECTION>& scratch) {
  for (int64_t r = 0; r < s.reduction; r += kChain) {
    const int64_t depth = std::min(kChain, s.reduction - r);
    for (int64_t begin = 0; begin < outputs; begin += kPanel<DIRECTION>) {
      const int64_t width = std::min(kPanel<DIRECTION>, outputs - begin);
      decode_panel<DTYPE, DIRECTION>(s, source, output + begin, width, r, depth, scratch.w.get());
      multiply_panel<DIRECTION>(s, begin, width, r, depth, scratch);
    }
  }
  store_outputs<DTYPE, DIRECTION>(s, output, outputs, scratch);
}

// Outputs of a task: few enough that all threads have work and that their panels together stay below kMaxPanelBytes. Tasks of grad_x start
// on cache lines of W (128 weights) where its rows do.
template <Direction DIRECTION>
int64_t task_outputs(int64_t outputs) {
  constexpr int64_t kUnit = DIRECTION == Direction::kForward ? kOutputs<1> : 128;
  const int64_t threads = num_threads();
  const int64_t share = (outputs + 2 * threads - 1) / (2 * threads);
  const int64_t limit = kMaxPanelBytes / (kChain * static_cast<int64_t>(sizeof(float)) * threads) - kPadding;
  int64_t task = std::min(share, kTask<DIRECTION>);
  if (limit < kPanel<DIRECTION>) task = std::min(task, limit);
  return std::max(task / kUnit * kUnit, kUnit);
}

template <DType DTYPE, Direction DIRECTION>
void run_tasks(Shared& s) {
  const Source source(s.args.weight);
  s.task = task_outputs<DIRECTION>(s.outputs);
  const int64_t tasks = (s.outputs + s.task - 1) / s.task;
  std::atomic<int64_t> next{0};
  parallel_for(std::min<int64_t>(num_threads(), tasks), 1, [&](int64_t, int64_t) {
    if (next >= tasks) return;
    Scratch<DIRECTION> scratch(s);
    for (int64_t task = next++; task < tasks; task = next++) {
      run_task<DTYPE, DIRECTION>(s, source, task * s.task, std::min(s.task, s.outputs - task * s.task), scratch);
    }
  });
}

template <DType DTYPE>
void multiply_all(const LinearProblem& problem, const LinearArgs& args) {
  const bool forward = problem.direction == Direction::kForward;
  Shared s{problem, args,   0, Tiling(std::min(problem.m, kRowBlock)), forward ? problem.n : problem.k, forward ? problem.k : problem.n,
           0,       nullptr};
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
