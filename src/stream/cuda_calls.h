// The calls of the CUDA runtime that streaming makes, as an interface: their order is what makes a refill safe, and a recording fake of
// this can be asked for it where there is no GPU.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "nybble/stream.h"

namespace nybble {

using CudaEvent = void*;  // a cudaEvent_t

// Every call throws kCuda or kOutOfMemory when it is refused and leaves no CUDA error pending.
class CudaCalls {
 public:
  virtual ~CudaCalls() = default;
  virtual int set_device(int ordinal) = 0;  // returns the one before
  virtual void restore_device(int ordinal) noexcept = 0;
  virtual ComputeStream create_stream() = 0;  // ordered with no other stream, the default one included
  virtual void destroy_stream(ComputeStream stream) noexcept = 0;
  virtual CudaEvent create_event() = 0;
  virtual void destroy_event(CudaEvent event) noexcept = 0;

  virtual void record(CudaEvent event, ComputeStream stream) = 0;
  virtual void wait(ComputeStream stream, CudaEvent event) = 0;  // what follows on stream comes after event's last record
  virtual void copy(void* to, const void* from, int64_t bytes, ComputeStream stream) = 0;
  virtual void fill(void* to, int value, int64_t bytes, ComputeStream stream) = 0;
  virtual void sleep(std::chrono::microseconds time, ComputeStream stream) = 0;  // delays what follows on stream
  virtual void finish(ComputeStream stream) = 0;                                 // blocks the host until stream is done
  virtual bool capturing(ComputeStream stream) = 0;
};

std::unique_ptr<CudaCalls> make_cuda_calls();  // of this process's CUDA runtime; throws kUnsupported in a build without CUDA
std::unique_ptr<CopyEngine> make_cuda_copy_engine(int device, int slots, CopyOptions options, std::unique_ptr<CudaCalls> calls);

}  // namespace nybble
