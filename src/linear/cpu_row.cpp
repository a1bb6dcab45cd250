// The CPU multiply for few rows (grad_x: one): W is read once, in the order in which it lies in memory, and a single row uses the weights
// in registers as they are decoded.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "linear/cpu_row.cpp"
// The targets are chosen before Highway is seen:
// clang-format off
#include "linear/cpu_targets.h"
#include <hwy/foreach_target.h>
// clang-format on
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <vector>

#include "core/parallel.h"
#include "linear/cpu_paths.h"
#if HWY_TARGET != HWY_SCALAR
#  include "linear/cpu_convert-inl.h"
#  include "linear/cpu_decode-inl.h"
#else
#  include "linear/cpu_plain-inl.h"
#endif

#ifndef NYBBLE_LINEAR_CPU_ROW_CONSTANTS_
#  define NYBBLE_LINEAR_CPU_ROW_CONSTANTS_
namespace nybble::cpu {
constexpr int64_t kRowSegment = 2048;  // weights whose tables are built together: at most 66 blocks, 4 KiB, beside the activation in L1
constexpr int64_t kFetchAhead = 2048;  // bytes of W: hardware prefetchers stop at the end of a page
constexpr int64_t kForwardGrain = 16;  // output features a thread takes at a time
}  // namespace nybble::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace nybble::cpu::HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR
namespace {

// Appends `count` values as fp32 in decoded order, zeros up to a whole run.
template <DType DTYPE>
void append_decoded_order(const void* in, int64_t first, int64_t count, std::vector<float>& out) {
  std::vector<float> plain(static_cast<size_t>((count + kRun - 1) / kRun * kRun));
  load_row<DTYPE>(in, first, count, plain.data());
  const size_t base = out.size();
  out.resize(base + plain.size());
  for (size_t i = 0; i < plain.size(); i++) out[base + i / kRun * kRun + decoded_place(i % kRun)] = plain[i];
}

// Calls use(run, step, v) for the runs of weights [first, first + count), which start on a group: v holds a vector's worth of each of its
// places.
template <DType DTYPE, bool ONE, class Use>
HWY_INLINE void for_whole_runs(const Source& source, int64_t first, int64_t runs, const Tables<DTYPE, kRowSegment>& tables, Use&& use) {
  VFloats v[8];
  for (int64_t run = 0; run < runs; run++) {
    const int64_t i = first + run * kRun;
    const uint8_t* a = tables.of(i);
    const uint8_t* b = ONE ? a : tables.of(i + kGroup);
    hwy::Prefetch(source.weight.packed + std::min(i / 2 + kFetchAhead, source.packed_size - 1));
    NYBBLE_UNROLL
    for (int step = 0; step < kSteps; step++) {
      decode_places<DTYPE, ONE>(source.weight.packed + i / 2 + 16 * step, step == 0 ? a : b, b, v);
      use(run, step, v);
    }
  }
}

// The same for any first and count; zeros past the end.
template <DType DTYPE, class Use>
HWY_INLINE void for_each_run(const Source& source, int64_t first, int64_t count, Tables<DTYPE, kRowSegment>& tables, Use&& use) {
  tables.build(source, first, count);
  const int64_t whole = first % kGroup == 0 ? count / kRun : 0;
  if (first % kRun == 0 && source.weight.block_size >= kRun) {
    for_whole_runs<DTYPE, true>(source, first, whole, tables, use);
  } else {
    for_whole_runs<DTYPE, false>(source, first, whole, tables, use);
  }
  VFloats v[8];
  for (int64_t run = whole; run * kRun < count; run++) {  // rows that do not start on a group, and the last, partial run
    float weights[kRun] = {};
    alignas(64) float places[kRun];
    decode_with(source, first + run * kRun, std::min(kRun, count - run * kRun), tables, weights);
    for (int64_t p = 0; p < kRun; p++) places[decoded_place(p)] = weights[p];
    NYBBLE_UNROLL
    for (int step = 0; step < kSteps; step++) {
      NYBBLE_UNROLL
      for (int j = 0; j < 8; j++) v[j] = hn::Load(Floats(), places + (8 * step + j) * kLanes);
      use(run, step, v);
    }
  }
}

// The 32 sums of a row's product with an output feature.
class PlaceSums {
 public:
  PlaceSums() {
    NYBBLE_UNROLL
    for (int i = 0; i < kSteps * 4; i++) sums_[i] = hn::Zero(Floats());
  }
  // at: the activation's run, in decoded order.
  HWY_INLINE void add(int step, const VFloats (&v)[8], const float* HWY_RESTRICT at) {
    const Floats d;
    NYBBLE_UNROLL
    for (int j = 0; j < 8; j++) {
      VFloats& sum = sums_[4 * step + j % 4];
      sum = hn::MulAdd(v[j], hn::LoadU(d, at + (8 * step + j) * kLanes), sum);
    }
  }
  // The fixed tree: over bits 0 and 1 of the place, then 5, then 2 and 3.
  HWY_INLINE float total() const {
    const Floats d;
    alignas(64) float lanes[kSteps * kLanes];
    NYBBLE_UNROLL
    for (int s = 0; s < kSteps; s++) {
      const VFloats* sum = sums_ + 4 * s;
      hn::Store(hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3])), d, lanes + s * kLanes);
    }
    float total[4];
    for (int l = 0; l < 4; l++) total[l] = lanes[l] + lanes[4 + l];
    return (total[0] + total[1]) + (total[2] + total[3]);
  }

 private:
  VFloats sums_[kSteps * 4];
};

// out[0 .. rows) = the products of feature n with x[rows][pitch]. One row uses the weights as they leave the decoder, more rows read them
// back.
template <DType DTYPE>
void dot_rows(const Source& source, int64_t n, const float* HWY_RESTRICT x, int64_t rows, int64_t pitch, Tables<DTYPE, kRowSegment>& tables,
              float* HWY_RESTRICT out) {
  const Floats d;
  const int64_t k = source.weight.k;
  PlaceSums sums[kFewRows];
  alignas(64) float w[kRowSegment];
  for (int64_t begin = 0; begin < k; begin += kRowSegment) {
    const int64_t count = std::min(kRowSegment, k - begin);
    if (rows == 1) {
      PlaceSums sum = sums[0];
      for_each_run<DTYPE>(source, n * k + begin, count, tables,
                          [&](int64_t run, int step, const VFloats(&v)[8]) HWY_ATTR { sum.add(step, v, x + begin + run * kRun); });
      sums[0] = sum;
      continue;
    }
    for_each_run<DTYPE>(source, n * k + begin, count, tables, [&](int64_t run, int step, const VFloats(&v)[8]) HWY_ATTR {
      NYBBLE_UNROLL
      for (int j = 0; j < 8; j++) hn::Store(v[j], d, w + run * kRun + (8 * step + j) * kLanes);
    });
    for (int64_t m = 0; m < rows; m++) {
      PlaceSums sum = sums[m];
      for (int64_t i = 0; i < count; i += kRun) {
        NYBBLE_UNROLL
        for (int step = 0; step < kSteps; step++) {
          VFloats v[8];
          NYBBLE_UNROLL
          for (int j = 0; j < 8; j++) v[j] = hn::Load(d, w + i + (8 * step + j) * kLanes);
          sum.add(step, v, x + m * pitch + begin + i);
        }
      }
      sums[m] = sum;
    }
  }
  for (int64_t m = 0; m < rows; m++) out[m] = sums[m].total();
}

template <DType DTYPE>
void forward(const LinearProblem& problem, const LinearArgs& args) {
  const Source source(args.weight);
  const int64_t pitch = (problem.k + kRun - 1) / kRun * kRun;
  std::vector<float> x;
  for (int64_t m = 0; m < problem.m; m++) append_decoded_order<DTYPE>(args.in, m * args.in_row_stride, problem.k, x);
  parallel_for(problem.n, kForwardGrain, [&](int64_t begin, int64_t end) {
    Tables<DTYPE, kRowSegment> tables;
    float sums[kForwardGrain][kFewRows];
    float bias[kForwardGrain] = {};
    float row[kForwardGrain];
    for (int64_t n = begin; n < end; n++) dot_rows<DTYPE>(source, n, x.data(), problem.m, pitch, tables, sums[n - begin]);
    if (problem.bias) load_row<DTYPE>(args.bias, begin, end - begin, bias);
    for (int64_t m = 0; m < problem.m; m++) {
      for (int64_t i = 0; i < end - begin; i++) row[i] = problem.bias ? sums[i][m] + bias[i] : sums[i][m];
      store_row<DTYPE>(row, m * problem.n + begin, end - begin, args.out);
    }
  });
}

// chain[0 .. width) = sum over the rows of one chain of g[n] * W[n][begin ..), in decoded order.
template <DType DTYPE>
void chain_rows(const Source& source, const float* g, int64_t n_begin, int64_t n_end, int64_t k_begin, int64_t width,
                float* HWY_RESTRICT chain) {
  const Floats d;
  Tables<DTYPE, kRowSegment> tables;
  std::fill_n(chain, (width + kRun - 1) / kRun * kRun, 0.0f);
  for (int64_t n = n_begin; n < n_end; n++) {
    const VFloats factor = hn::Set(d, g[n]);
    for_each_run<DTYPE>(source, n * source.weight.k + k_begin, width, tables, [&](int64_t run, int step, const VFloats(&v)[8]) HWY_ATTR {
      float* at = chain + run * kRun + 8 * step * kLanes;
      NYBBLE_UNROLL
      for (int j = 0; j < 8; j++) hn::StoreU(hn::MulAdd(v[j], factor, hn::LoadU(d, at + j * kLanes)), d, at + j * kLanes);
    });
  }
}

template <DType DTYPE>
void grad(const LinearProblem& problem, const LinearArgs& args) {
  const Source source(args.weight);
  const int64_t strips = (problem.k + kRowSegment - 1) / kRowSegment;
  const int64_t chains = (problem.n + kChain - 1) / kChain;
  const int64_t pitch = strips * kRowSegment;
  std::vector<float> g(static_cast<size_t>(problem.n));
  load_row<DTYPE>(args.in, 0, problem.n, g.data());
  std::vector<float> partial(static_cast<size_t>(chains * pitch));  // [chains][k]: 1/128 of W in bf16
  parallel_for(chains * strips, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; task++) {
      const int64_t chain = task / strips;
      const int64_t k = task % strips * kRowSegment;
      chain_rows<DTYPE>(source, g.data(), chain * kChain, std::min(problem.n, (chain + 1) * kChain), k,
                        std::min(kRowSegment, problem.k - k), partial.data() + chain * pitch + k);
    }
  });
  parallel_for(problem.k, kRowSegment, [&](int64_t begin, int64_t end) {
    float row[kRowSegment];
    for (int64_t chain = 1; chain < chains; chain++) {
      for (int64_t i = 0; i < kRowSegment; i++) partial[begin + i] += partial[chain * pitch + begin + i];
    }
    for (int64_t i = 0; i < end - begin; i++) row[i] = chains == 0 ? 0.0f : partial[begin + i / kRun * kRun + decoded_place(i % kRun)];
    store_row<DTYPE>(row, begin, end - begin, args.out);
  });
}

}  // namespace

template <class Run>
void with_dtype(DType dtype, Run&& run) {
  switch (dtype) {
    case DType::kBFloat16:
      return run.template operator()<DType::kBFloat16>();
    case DType::kFloat16:
      return run.template operator()<DType::kFloat16>();
    case DType::kFloat32:
      return run.template operator()<DType::kFloat32>();
  }
}

void run_rows(const LinearProblem& problem, const LinearArgs& args) {
  with_dtype(problem.dtype,
             [&]<DType DTYPE>() { problem.direction == Direction::kForward ? forward<DTYPE>(problem, args) : grad<DTYPE>(problem, args); });
}
#else
void run_rows(const LinearProblem& problem, const LinearArgs& args) { plain_multiply(problem, args); }
#endif

}  // namespace nybble::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace nybble::cpu {
HWY_EXPORT(run_rows);
void multiply_rows(const LinearProblem& problem, const LinearArgs& args) { HWY_DYNAMIC_DISPATCH(run_rows)(problem, args); }

int64_t supported_targets() { return hwy::SupportedTargets() & (HWY_TARGETS); }
void force_target(int64_t target) {
  hwy::SetSupportedTargetsForTest(target);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}
const char* target_name() { return hwy::TargetName(supported_targets() & -supported_targets()); }
}  // namespace nybble::cpu
#endif
