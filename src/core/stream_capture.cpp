#include <cuda_runtime_api.h>

#include "nybble/cuda.h"
#include "nybble/error.h"

bool nybble::cuda_stream_is_capturing(CudaStream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  if (error != cudaSuccess) fail(ErrorKind::kCuda, "cudaStreamIsCapturing: ", cudaGetErrorString(error));
  return status != cudaStreamCaptureStatusNone;
}
