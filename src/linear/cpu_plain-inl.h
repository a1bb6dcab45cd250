// The multiply where Highway has no vectors for the CPU: plain loops in the panel order, products rounded. Compiled for the scalar target
// only.
#pragma once

#include <algorithm>
#include <vector>

#include "core/parallel.h"
#include "format/rounding.h"
#include "linear/cpu_paths.h"

namespace nybble::cpu {

inline void plain_store(DType dtype, float value, void* out, int64_t index) {
  auto* bytes = static_cast<unsigned char*>(out) + index * size_of(dtype);
  const uint16_t half = dtype == DType::kFloat16 ? format::to_fp16(value) : format::to_bf16(value);
  std::memcpy(bytes, dtype == DType::kFloat32 ? static_cast<const void*>(&value) : &half, static_cast<size_t>(size_of(dtype)));
}

// Weights [first, first + count) in the compute dtype, as fp32.
inline void plain_weights(const LinearProblem& problem, const Nf4Weight& weight, int64_t first, int64_t count, float* out) {
  unsigned char rounded[kChain * sizeof(float)];
  dequantize_4bit(weight, problem.dtype, first, count, rounded);
  for (int64_t i = 0; i < count; i++) out[i] = format::load_as_float(rounded, problem.dtype, i);
}

// y[:, row]
inline void plain_forward_row(const LinearProblem& problem, const LinearArgs& args, int64_t row) {
  float w[kChain];
  std::vector<float> sums(static_cast<size_t>(problem.m));
  for (int64_t k = 0; k < problem.k; k += kChain) {
    const int64_t depth = std::min(kChain, problem.k - k);
    plain_weights(problem, args.weight, row * problem.k + k, depth, w);
    for (int64_t m = 0; m < problem.m; m++) {
      float chain = 0;
      for (int64_t i = 0; i < depth; i++) chain += w[i] * format::load_as_float(args.in, problem.dtype, m * args.in_row_stride + k + i);
      sums[m] = k == 0 ? chain : sums[m] + chain;
    }
  }
  const float bias = problem.bias ? format::load_as_float(args.bias, problem.dtype, row) : 0.0f;
  for (int64_t m = 0; m < problem.m; m++)
    plain_store(problem.dtype, problem.bias ? sums[m] + bias : sums[m], args.out, m * problem.n + row);
}

// grad_x[:, begin .. end), at most kChain columns.
inline void plain_grad_columns(const LinearProblem& problem, const LinearArgs& args, int64_t begin, int64_t end) {
  const int64_t width = end - begin;
  float w[kChain];
  std::vector<float> chains(static_cast<size_t>(problem.m * width));
  std::vector<float> sums(chains.size());
  for (int64_t n = 0; n < problem.n; n++) {
    plain_weights(problem, args.weight, n * problem.k + begin, width, w);
    for (int64_t m = 0; m < problem.m; m++) {
      const float g = format::load_as_float(args.in, problem.dtype, m * args.in_row_stride + n);
      for (int64_t i = 0; i < width; i++) chains[m * width + i] += w[i] * g;
    }
    if ((n + 1) % kChain != 0 && n + 1 != problem.n) continue;
    for (size_t i = 0; i < sums.size(); i++) sums[i] = n < kChain ? chains[i] : sums[i] + chains[i];
    std::fill(chains.begin(), chains.end(), 0.0f);
  }
  for (int64_t m = 0; m < problem.m; m++) {
    for (int64_t i = 0; i < width; i++) plain_store(problem.dtype, sums[m * width + i], args.out, m * problem.k + begin + i);
  }
}

inline void plain_multiply(const LinearProblem& problem, const LinearArgs& args) {
  if (problem.direction == Direction::kForward) {
    parallel_for(problem.n, 8, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) plain_forward_row(problem, args, row);
    });
  } else {
    parallel_for(problem.k, kChain, [&](int64_t begin, int64_t end) { plain_grad_columns(problem, args, begin, end); });
  }
}

}  // namespace nybble::cpu
