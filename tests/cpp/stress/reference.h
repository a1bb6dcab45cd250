// The stress test's own arithmetic, on the GPU and by the simplest means: weights decoded one by one, products added in float64.
#pragma once

#include <cuda_runtime_api.h>

#include "stress/shapes.h"

namespace nybble::stress {

// The first output of a batch that was wrong. count: of all wrong outputs.
struct Report {
  unsigned long long count;
  int index;          // of the case in the batch
  long long element;  // -1: bytes outside the output were written, -2: two runs gave different bits
  double found, expected, tolerance;
};

constexpr int64_t kGuardBytes = 256;  // before and behind every output
constexpr uint8_t kPoison = 0xFF;     // of outputs and guards: NaN

// Fills: random bytes; 16-bit numbers of about 0.5 in size; scales from 0.01 to 0.1.
void fill_bytes(uint8_t* out, int64_t count, uint64_t seed, cudaStream_t stream);
void fill_activations(void* out, DType dtype, int64_t count, uint64_t seed, cudaStream_t stream);
// rows of `stride` elements, the first `reduction` of which are 0 but for one 1.
void fill_one_hot(void* out, DType dtype, int64_t rows, int64_t reduction, int64_t stride, int shift, cudaStream_t stream);
void fill_scales(float* out, int64_t count, uint64_t seed, cudaStream_t stream);

// Compares every output of a case with its float64 value; `dense` holds n * k elements for the decoded weight. Tolerance: half a unit in
// the last place of the output, plus 2^-17 of the sum of absolute products for fp32 sums (one product of 4096 is 2^-12 of it).
// exact: no tolerance, for one-hot activations without a bias.
void check_case(const Case& c, int index, bool exact, const LinearArgs& args, void* dense, Report* report, cudaStream_t stream);
void check_guards(const uint8_t* out, int64_t bytes, int index, Report* report, cudaStream_t stream);
// Bits of two runs of a batch.
void check_equal(const void* first, const void* second, int64_t bytes, Report* report, cudaStream_t stream);

}  // namespace nybble::stress
