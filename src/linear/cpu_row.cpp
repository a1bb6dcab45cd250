// The CPU multiply for one row: the weights are used in registers as they are decoded, nothing is written back. Bound by the decode, about
// 0.4 cycles a weight, and by reading W.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "linear/cpu_row.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <vector>

#include "core/parallel.h"
#include "linear/cpu_paths.h"
#include "linear/cpu_targets.h"
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
constexpr int64_t kForwardGrain = 16;  // output features a thread takes at a time
}  // namespace nybble::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace nybble::cpu::HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR
namespace {

// `count` values as fp32 in decoded order, zeros up to a whole run.
template <DType DTYPE>
std::vector<float> load_decoded_order(const void* in, int64_t count) {
  std::vector<float> plain(static_cast<size_t>((count + kRun - 1) / kRun * kRun));
  load_row<DTYPE>(in, 0, count, plain.data());
  std::vector<float> result(plain.size());
  for (size_t i = 0; i < plain.size(); i++) result[i / kRun * kRun + decoded_place(i % kRun)] = plain[i];
  return result;
}

// Calls use(run, step, v) for the runs of weights [first, first + count): v holds a vector's worth of each of its places, zeros past the
// end.
template <DType DTYPE, class Use>
HWY_INLINE void for_each_run(const Source& source, int64_t first, int64_t count, Tables<DTYPE, kRowSegment>& tables, Use&& use) {
  tables.build(source, first, count);
  VFloats v[8];
  const int64_t whole = first % kGroup == 0 ? count / kRun : 0;
  for (int64_t run = 0; run < whole; run++) {
    const int64_t i = first + run * kRun;
    const uint8_t* a = tables.of(i);
    const uint8_t* b = tables.of(i + kGroup);
    NYBBLE_UNROLL
    for (int step = 0; step < kSteps; step++) {
      decode_places<DTYPE>(source.weight.packed + i / 2 + 16 * step, step == 0 ? a : b, b, v);
      use(run, step, v);
    }
  }
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

// The fixed tree over the 64 sums. Of a place's bits, it adds over 0 and 1 first, then 4, 5, and last 2 and 3.
HWY_INLINE float add_places(const VFloats (&sums)[kSteps][8]) {
  const Floats d;
  alignas(64) float lanes[kSteps * kLanes];
  NYBBLE_UNROLL
  for (int s = 0; s < kSteps; s++) {
    const VFloats lower = hn::Add(hn::Add(sums[s][0], sums[s][1]), hn::Add(sums[s][2], sums[s][3]));
    const VFloats upper = hn::Add(hn::Add(sums[s][4], sums[s][5]), hn::Add(sums[s][6], sums[s][7]));
    hn::Store(hn::Add(lower, upper), d, lanes + s * kLanes);
  }
  float total[4];
  for (int l = 0; l < 4; l++) total[l] = lanes[l] + lanes[4 + l];
  return (total[0] + total[1]) + (total[2] + total[3]);
}

template <DType DTYPE>
float dot_row(const Source& source, int64_t row, const float* HWY_RESTRICT x, Tables<DTYPE, kRowSegment>& tables) {
  const Floats d;
  const int64_t k = source.weight.k;
  VFloats sums[kSteps][8];
  NYBBLE_UNROLL
  for (int s = 0; s < kSteps; s++) {
    NYBBLE_UNROLL
    for (int j = 0; j < 8; j++) sums[s][j] = hn::Zero(d);
  }
  for (int64_t begin = 0; begin < k; begin += kRowSegment) {
    for_each_run<DTYPE>(source, row * k + begin, std::min(kRowSegment, k - begin), tables,
                        [&](int64_t run, int step, const VFloats(&v)[8]) HWY_ATTR {
                          const float* at = x + begin + run * kRun + 8 * step * kLanes;
                          NYBBLE_UNROLL
                          for (int j = 0; j < 8; j++) {
                            sums[step][j] = hn::MulAdd(v[j], hn::LoadU(d, at + j * kLanes), sums[step][j]);
                          }
                        });
  }
  return add_places(sums);
}

template <DType DTYPE>
void forward(const LinearProblem& problem, const LinearArgs& args) {
  const Source source(args.weight);
  const std::vector<float> x = load_decoded_order<DTYPE>(args.in, problem.k);
  parallel_for(problem.n, kForwardGrain, [&](int64_t begin, int64_t end) {
    Tables<DTYPE, kRowSegment> tables;
    float sums[kForwardGrain];
    float bias[kForwardGrain];
    for (int64_t n = begin; n < end; n++) sums[n - begin] = dot_row<DTYPE>(source, n, x.data(), tables);
    if (problem.bias) {
      load_row<DTYPE>(args.bias, begin, end - begin, bias);
      for (int64_t i = 0; i < end - begin; i++) sums[i] += bias[i];
    }
    store_row<DTYPE>(sums, begin, end - begin, args.out);
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

void run_row(const LinearProblem& problem, const LinearArgs& args) {
  with_dtype(problem.dtype,
             [&]<DType DTYPE>() { problem.direction == Direction::kForward ? forward<DTYPE>(problem, args) : grad<DTYPE>(problem, args); });
}
#else
void run_row(const LinearProblem& problem, const LinearArgs& args) { plain_multiply(problem, args); }
#endif

}  // namespace nybble::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace nybble::cpu {
HWY_EXPORT(run_row);
void multiply_row(const LinearProblem& problem, const LinearArgs& args) { HWY_DYNAMIC_DISPATCH(run_row)(problem, args); }

int64_t supported_targets() { return hwy::SupportedTargets() & (HWY_TARGETS); }
void force_target(int64_t target) {
  hwy::SetSupportedTargetsForTest(target);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}
const char* target_name() { return hwy::TargetName(supported_targets() & -supported_targets()); }
}  // namespace nybble::cpu
#endif
