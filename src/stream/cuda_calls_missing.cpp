// Stands in for cuda_calls.cpp in a build without CUDA.
#include "stream/cuda_calls.h"

namespace nybble {
namespace {

[[noreturn]] void fail_without_cuda() {
  fail(ErrorKind::kUnsupported,
       "this nybble was built without CUDA, so it cannot stream to a GPU; build it with nvcc, or use device=\"cpu\"");
}

}  // namespace

std::unique_ptr<CudaCalls> make_cuda_calls() { fail_without_cuda(); }
std::shared_ptr<HostLocker> make_cuda_host_locker() { fail_without_cuda(); }

}  // namespace nybble
