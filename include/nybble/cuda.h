// The CUDA side of the core. Callable from plain C++; built only where NYBBLE_HAVE_CUDA is defined. Every function launches on the given
// stream, allocates nothing, never synchronises and throws Error(kCuda) when a launch is refused. Pointers are device pointers unless said
// otherwise.
#pragma once

#include "nybble/format.h"
#include "nybble/linear.h"

namespace nybble {

using CudaStream = void*;  // a cudaStream_t; null is the legacy default stream

int cuda_device_count();  // 0 without a driver, never throws
// Read once, thread safe. Throws kValue without such a device, kUnsupported where the driver is too old for this build or the build has no
// code for the card.
const DeviceModel& cuda_device_model(int ordinal);

// Runs a plan that plan_linear() made for this problem and device. args.workspace holds plan.workspace_bytes. Never called with a kDequant
// plan: there the caller dequantises and multiplies with its own dense matmul.
void linear_cuda(const LinearPlan& plan, const LinearProblem& problem, const LinearArgs& args, CudaStream stream);

// out[0 .. count) = weights [first, first + count) of the flattened weight in dtype (the whole weight: 0, n * k). Any first, any block
// size, any address, nested or plain. Twin of dequantize_4bit() of format.h, so that callers can work in panels.
void dequantize_4bit_cuda(const Nf4Weight& weight, DType dtype, int64_t first, int64_t count, void* out, CudaStream stream);
// True while the stream records into a CUDA graph, whose replays skip host checks.
bool cuda_stream_is_capturing(CudaStream stream);

// Twins of the functions of format.h, bit-identical with bitsandbytes' CUDA backend.
void quantize_4bit_cuda(const void* x, DType dtype, int64_t n, int block_size, QuantType type, uint8_t* packed, float* absmax,
                        CudaStream stream);
void absmax_mean_cuda(const float* absmax, int64_t blocks, double* workspace, float* mean,
                      CudaStream stream);  // workspace: [ceil(blocks / 256)]
void quantize_scales_cuda(const float* absmax, int64_t blocks, const float* offset, const float* nested_code, uint8_t* codes,
                          float* nested_absmax, CudaStream stream);

}  // namespace nybble
