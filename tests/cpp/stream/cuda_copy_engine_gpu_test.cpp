// The CUDA engine on a GPU: a refill that is really late is waited for, and without the wait the reader sees it.
#include <sys/mman.h>

#include <cstring>

#include "format/device_array.h"
#include "ring_fixture.h"
#include "stream/cuda_calls.h"

namespace nybble {
namespace {

constexpr int64_t kBytes = int64_t{1} << 22;
constexpr auto kLate = std::chrono::milliseconds(40);

// The runtime, but a wait of the given stream is forgotten: the fault that the engine exists to prevent.
class WithoutWaits final : public CudaCalls {
 public:
  explicit WithoutWaits(ComputeStream forgetful) : calls_(make_cuda_calls()), forgetful_(forgetful) {}
  int set_device(int ordinal) override { return calls_->set_device(ordinal); }
  void restore_device(int ordinal) noexcept override { calls_->restore_device(ordinal); }
  ComputeStream create_stream() override { return calls_->create_stream(); }
  void destroy_stream(ComputeStream stream) noexcept override { calls_->destroy_stream(stream); }
  CudaEvent create_event() override { return calls_->create_event(); }
  void destroy_event(CudaEvent event) noexcept override { calls_->destroy_event(event); }
  void record(CudaEvent event, ComputeStream stream) override { calls_->record(event, stream); }
  void wait(ComputeStream stream, CudaEvent event) override {
    if (stream != forgetful_) calls_->wait(stream, event);
  }
  void copy(void* to, const void* from, int64_t bytes, ComputeStream stream) override { calls_->copy(to, from, bytes, stream); }
  void fill(void* to, int value, int64_t bytes, ComputeStream stream) override { calls_->fill(to, value, bytes, stream); }
  void sleep(std::chrono::microseconds time, ComputeStream stream) override { calls_->sleep(time, stream); }
  void finish(ComputeStream stream) override { calls_->finish(stream); }
  bool capturing(ComputeStream stream) override { return calls_->capturing(stream); }

 private:
  std::unique_ptr<CudaCalls> calls_;
  ComputeStream forgetful_;
};

// Page-locked layers on the host, two slots on the device, a compute stream that takes a copy of the slot where a multiply would read it.
class Pipeline {
 public:
  explicit Pipeline(bool forget_ready, CopyOptions copy) : host_(make_cuda_host_locker()), layers_(kLayers) {
    check(cudaStreamCreateWithFlags(&compute_, cudaStreamNonBlocking));
    std::vector<RingLayer> layers;
    for (int layer = 0; layer < kLayers; layer++) {
      EXPECT_EQ(host_->allocate(kBytes, &layers_[layer]), "");
      std::memset(layers_[layer], layer + 1, kBytes);
      uids_.push_back(register_owner("L" + std::to_string(layer), {}));
      layers.push_back({uids_.back(), {static_cast<const std::byte*>(layers_[layer]), static_cast<size_t>(kBytes)}});
    }
    std::vector<std::byte*> slots;
    for (auto& slot : slots_) slots.push_back(slot.data());
    auto calls = forget_ready ? std::make_unique<WithoutWaits>(compute_) : make_cuda_calls();
    ring_ = std::make_unique<SlotRing>(layers, slots, kBytes, make_cuda_copy_engine(0, 2, copy, std::move(calls)));
  }
  ~Pipeline() {
    ring_.reset();
    for (void* layer : layers_) host_->free(layer);
    for (const int64_t uid : uids_) forget_owner(uid);
    cudaStreamDestroy(compute_);
  }

  // How many of `visits` forward visits read their own layer's bytes and nothing else.
  int exact_visits(int visits) {
    std::vector<std::unique_ptr<test::DeviceArray<std::byte>>> seen;
    for (int i = 0; i < visits; i++) {
      seen.push_back(std::make_unique<test::DeviceArray<std::byte>>(kBytes));
      const int layer = i % kLayers;
      EXPECT_TRUE(ring_->acquire(layer, Order::kRepeat, compute_, kPatience, nullptr));
      check(cudaMemcpyAsync(seen.back()->data(), slots_[layer % 2].data(), kBytes, cudaMemcpyDeviceToDevice, compute_));
      if (i % 3 != 2) ring_->release(layer, compute_);
    }
    check(cudaDeviceSynchronize());
    int exact = 0;
    std::vector<std::byte> host(kBytes);
    for (int i = 0; i < visits; i++) {
      check(cudaMemcpy(host.data(), seen[static_cast<size_t>(i)]->data(), kBytes, cudaMemcpyDeviceToHost));
      const auto own = static_cast<std::byte>(i % kLayers + 1);
      exact += std::all_of(host.begin(), host.end(), [own](std::byte b) { return b == own; });
    }
    return exact;
  }

 private:
  static constexpr int kLayers = 5;
  std::shared_ptr<HostLocker> host_;
  std::vector<void*> layers_;
  std::vector<int64_t> uids_;
  test::DeviceArray<std::byte> slots_[2] = {test::DeviceArray<std::byte>(kBytes), test::DeviceArray<std::byte>(kBytes)};
  cudaStream_t compute_ = nullptr;
  std::unique_ptr<SlotRing> ring_;
};

TEST(CudaCopyEngineOnGpu, LateRefillsAreWaitedForAndTheHostDoesNotWait) {
  NYBBLE_NEEDS_GPU();
  for (const bool late : {false, true}) {
    CopyOptions copy;
    if (late) copy.delay = kLate;
    EXPECT_EQ(Pipeline(false, copy).exact_visits(12), 12) << late;
  }
}

TEST(CudaCopyEngineOnGpu, WithoutTheWaitForReadyAReaderSeesTheLateRefill) {
  NYBBLE_NEEDS_GPU();
  CopyOptions copy;
  copy.delay = kLate;
  EXPECT_LT(Pipeline(true, copy).exact_visits(12), 12);
}

TEST(CudaCopyEngineOnGpu, AFailedRefillLeavesTheSlotEmptyAndTheRetryIsExact) {
  NYBBLE_NEEDS_GPU();
  int left = 1;
  CopyOptions copy;
  copy.chunk_bytes = kBytes / 4;
  copy.observer = [&](int layer, int, int64_t begin, int64_t) {
    if (layer == 2 && begin == kBytes / 2 && left-- > 0) fail(ErrorKind::kIo, "injected");
  };
  Pipeline pipeline(false, copy);
  EXPECT_EQ(error_of(ErrorKind::kIo, [&] { pipeline.exact_visits(5); }), "injected");
  EXPECT_EQ(pipeline.exact_visits(10), 10);
}

TEST(HostLockerOnGpu, ARefusedPinLeavesNoErrorForTheNextCall) {
  NYBBLE_NEEDS_GPU();
  const auto locker = make_cuda_host_locker();
  void* const pages = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(pages, MAP_FAILED);
  std::memset(pages, 1, kBytes);
  EXPECT_EQ(locker->lock(pages, kBytes), "");
  EXPECT_NE(locker->lock(pages, kBytes), "") << "a second lock of the same pages is refused";
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  void* huge = nullptr;
  EXPECT_NE(locker->allocate(int64_t{1} << 50, &huge), "");
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  locker->unlock(pages);
  EXPECT_EQ(locker->lock(pages, kBytes), "") << "and is possible again";
  locker->unlock(pages);
  munmap(pages, kBytes);
}

}  // namespace
}  // namespace nybble
