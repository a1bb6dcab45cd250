// The weight arguments that every op of ours takes, checked and turned into the core's view.
#pragma once

#include "nybble/cuda.h"
#include "nybble/format.h"
#include "tensors.h"

namespace nybble::binding {

// In schema order: packed, absmax, code, nested_absmax?, nested_code?, offset?, [bias?], uid? and the ints.
struct WeightTensors {
  Tensor packed;                        // the bytes of uint8[(n * k + 1) / 2], any dtype and shape
  Tensor absmax;                        // float32[blocks], or uint8[blocks] codes when nested
  Tensor code;                          // float[16]; an input so that autograd saves it, the kernels use the table of quant_type
  std::optional<Tensor> nested_absmax;  // float32[ceil(blocks / 256)]
  std::optional<Tensor> nested_code;    // float[256]
  std::optional<Tensor> offset;         // float, one element
  std::optional<Tensor> uid;            // int64, one element, on the CPU
  int64_t n = 0;
  int64_t k = 0;
  int64_t block_size = 0;
  int64_t quant_type = 0;
  int64_t nested_dtype = 0;
};

// Checks everything against n, k, block size and device, and makes `tensors` contiguous in place where a view cannot be read as it is.
// The result points into `tensors`. Errors name the tensor, what was found and what was expected.
Nf4Weight checked_weight(WeightTensors& tensors, const Device& device);

// Refuses a launch on a recycled buffer that does not hold the weight named by uid. No-op without a uid.
// Under CUDA-graph capture it refuses as such: a replay would skip this check.
void check_owner(const WeightTensors& tensors, const Device& device);

// torch's current stream on a CUDA device, null on the CPU. kUnsupported when this torch has no CUDA.
CudaStream current_stream(const Device& device);

}  // namespace nybble::binding
