#include "stream/cuda_calls.h"

#include <cuda_runtime_api.h>

#include <string>
#include <thread>

#include "core/cuda_check.h"

namespace nybble {
namespace {

cudaStream_t stream_of(ComputeStream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t event_of(CudaEvent event) { return static_cast<cudaEvent_t>(event); }

class RuntimeCalls final : public CudaCalls {
 public:
  int set_device(int ordinal) override {
    int before = 0;
    check(cudaGetDevice(&before));
    if (before != ordinal) check(cudaSetDevice(ordinal));
    return before;
  }
  void restore_device(int ordinal) noexcept override { cudaSetDevice(ordinal); }
  ComputeStream create_stream() override {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
  }
  void destroy_stream(ComputeStream stream) noexcept override { cudaStreamDestroy(stream_of(stream)); }
  CudaEvent create_event() override {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
  }
  void destroy_event(CudaEvent event) noexcept override { cudaEventDestroy(event_of(event)); }

  void record(CudaEvent event, ComputeStream stream) override { check(cudaEventRecord(event_of(event), stream_of(stream))); }
  void wait(ComputeStream stream, CudaEvent event) override { check(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0)); }
  void copy(void* to, const void* from, int64_t bytes, ComputeStream stream) override {
    check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream_of(stream)));
  }
  void fill(void* to, int value, int64_t bytes, ComputeStream stream) override {
    check(cudaMemsetAsync(to, value, static_cast<size_t>(bytes), stream_of(stream)));
  }
  void sleep(std::chrono::microseconds time, ComputeStream stream) override {
    const auto nap = [](void* microseconds) {
      std::this_thread::sleep_for(std::chrono::microseconds(reinterpret_cast<intptr_t>(microseconds)));
    };
    check(cudaLaunchHostFunc(stream_of(stream), nap, reinterpret_cast<void*>(static_cast<intptr_t>(time.count()))));
  }
  void finish(ComputeStream stream) override { check(cudaStreamSynchronize(stream_of(stream))); }
  bool capturing(ComputeStream stream) override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream_of(stream), &status));
    return status != cudaStreamCaptureStatusNone;
  }
};

// A refused call reports once and is then forgotten: the next launch must not find its error.
std::string reason_of(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return "";
  cudaGetLastError();
  return std::string(call) + ": " + cudaGetErrorString(status);
}

class RuntimeLocker final : public HostLocker {
 public:
  std::string lock(void* address, int64_t bytes) override {
    return reason_of(cudaHostRegister(address, static_cast<size_t>(bytes), cudaHostRegisterPortable), "cudaHostRegister");
  }
  void unlock(void* address) noexcept override { reason_of(cudaHostUnregister(address), "cudaHostUnregister"); }
  std::string allocate(int64_t bytes, void** address) override {
    return reason_of(cudaHostAlloc(address, static_cast<size_t>(bytes), cudaHostAllocPortable), "cudaHostAlloc");
  }
  void free(void* address) noexcept override { reason_of(cudaFreeHost(address), "cudaFreeHost"); }
};

}  // namespace

std::unique_ptr<CudaCalls> make_cuda_calls() { return std::make_unique<RuntimeCalls>(); }
std::shared_ptr<HostLocker> make_cuda_host_locker() { return std::make_shared<RuntimeLocker>(); }

}  // namespace nybble
