// Refills of device slots: who waits for whom is in docs/streaming.md; every wait there is one call here.
#include <algorithm>
#include <utility>
#include <vector>

#include "stream/cuda_calls.h"

namespace nybble {
namespace {

enum class Phase : uint8_t { kIdle, kDeferred, kIssued };

struct SlotEvents {
  CudaEvent ready = nullptr;  // recorded on the copy stream behind a refill
  CudaEvent free = nullptr;   // recorded on compute at release
  Phase phase = Phase::kIdle;
  CopyRequest request;
};

class CudaCopyEngine final : public CopyEngine {
 public:
  CudaCopyEngine(int device, int slots, CopyOptions options, std::unique_ptr<CudaCalls> calls)
      : device_(device), options_(std::move(options)), calls_(std::move(calls)), slots_(static_cast<size_t>(slots)) {
    const DeviceScope scope(*this);
    try {
      copies_ = calls_->create_stream();
      now_ = calls_->create_event();
      for (SlotEvents& slot : slots_) {
        slot.ready = calls_->create_event();
        slot.free = calls_->create_event();
      }
    } catch (...) {
      destroy();
      throw;
    }
  }
  ~CudaCopyEngine() override {
    drain();
    destroy();
  }

  void enter(ComputeStream compute) override;
  void record_free(int slot, ComputeStream compute) override;
  void start(const CopyRequest& request, ComputeStream compute) override;
  bool wait_ready(int slot, ComputeStream compute, std::chrono::milliseconds timeout) override;
  void cancel(int slot) noexcept override;
  ComputeStream copy_stream() const override { return copies_; }

 private:
  // The null stream and new events belong to the calling thread's current device.
  class DeviceScope {
   public:
    explicit DeviceScope(CudaCopyEngine& engine) : engine_(engine), before_(engine.calls_->set_device(engine.device_)) {}
    ~DeviceScope() {
      if (before_ != engine_.device_) engine_.calls_->restore_device(before_);
    }

   private:
    CudaCopyEngine& engine_;
    const int before_;
  };

  SlotEvents& at(int slot) { return slots_[static_cast<size_t>(slot)]; }
  void enqueue(SlotEvents& slot);
  void drain() noexcept;
  void destroy() noexcept;

  const int device_;
  const CopyOptions options_;
  const std::unique_ptr<CudaCalls> calls_;
  ComputeStream copies_ = nullptr;
  CudaEvent now_ = nullptr;  // recorded and waited for at once: a wait keeps the record it saw
  std::vector<SlotEvents> slots_;
  bool entered_ = false;
  ComputeStream compute_ = nullptr;  // of the last visit
};

// Visits of one ring form one sequence: when they move to another stream, it first waits for all that the one before holds.
void CudaCopyEngine::enter(ComputeStream compute) {
  const DeviceScope scope(*this);
  if (calls_->capturing(compute))
    fail(ErrorKind::kUnsupported,
         "a streamed layer was run while its stream records a CUDA graph, whose replays could not fetch weights; capture resident models "
         "only");
  if (entered_ && compute != compute_) {
    calls_->record(now_, compute_);
    calls_->wait(compute, now_);
  }
  entered_ = true;
  compute_ = compute;
}

void CudaCopyEngine::record_free(int slot, ComputeStream compute) {
  const DeviceScope scope(*this);
  calls_->record(at(slot).free, compute);
}

void CudaCopyEngine::start(const CopyRequest& request, ComputeStream compute) {
  const DeviceScope scope(*this);
  SlotEvents& slot = at(request.slot);
  slot.request = request;
  if (request.wait_for_now) {
    calls_->record(now_, compute);
    calls_->wait(copies_, now_);
  } else {
    calls_->wait(copies_, slot.free);
  }
  if (request.poison) calls_->fill(request.to, 0xFF, request.bytes, copies_);
  if (options_.land_at_wait)
    slot.phase = Phase::kDeferred;
  else
    enqueue(slot);
}

// A refill that fails halfway leaves nothing that could still write to the slot.
void CudaCopyEngine::enqueue(SlotEvents& slot) {
  const CopyRequest& request = slot.request;
  const int64_t chunk = options_.chunk_bytes > 0 ? options_.chunk_bytes : request.bytes;
  slot.phase = Phase::kIssued;
  try {
    if (options_.delay.count() > 0) calls_->sleep(options_.delay, copies_);
    for (int64_t begin = 0; begin < request.bytes; begin += chunk) {
      const int64_t end = std::min(begin + chunk, request.bytes);
      if (options_.observer) options_.observer(request.layer, request.slot, begin, end);
      calls_->copy(request.to + begin, request.from + begin, end - begin, copies_);
    }
    calls_->record(slot.ready, copies_);
  } catch (...) {
    drain();
    slot.phase = Phase::kIdle;
    throw;
  }
}

bool CudaCopyEngine::wait_ready(int index, ComputeStream compute, std::chrono::milliseconds) {
  const DeviceScope scope(*this);
  SlotEvents& slot = at(index);
  if (slot.phase == Phase::kIdle) fail(ErrorKind::kValue, "no refill of slot ", index, " is under way; start one before waiting for it");
  if (slot.phase == Phase::kDeferred) {  // not before compute is here: an idle copy stream would overtake reads that are still queued
    calls_->record(now_, compute);
    calls_->wait(copies_, now_);
    enqueue(slot);
  }
  calls_->wait(compute, slot.ready);
  return true;
}

// A copy that was enqueued can't be taken back, only waited for: at most the time of a few layers.
void CudaCopyEngine::cancel(int index) noexcept {
  SlotEvents& slot = at(index);
  if (slot.phase == Phase::kIssued) drain();
  slot.phase = Phase::kIdle;
}

void CudaCopyEngine::drain() noexcept {
  if (copies_ == nullptr) return;
  try {
    calls_->finish(copies_);
  } catch (const Error&) {  // the device is lost: nothing writes any more
  }
}

void CudaCopyEngine::destroy() noexcept {
  for (SlotEvents& slot : slots_) {
    for (const CudaEvent event : {slot.ready, slot.free}) {
      if (event != nullptr) calls_->destroy_event(event);
    }
  }
  if (now_ != nullptr) calls_->destroy_event(now_);
  if (copies_ != nullptr) calls_->destroy_stream(copies_);
}

}  // namespace

std::unique_ptr<CopyEngine> make_cuda_copy_engine(int device, int slots, CopyOptions options, std::unique_ptr<CudaCalls> calls) {
  if (slots < 1) fail(ErrorKind::kValue, "a copy engine for ", slots, " slots, expected at least 1");
  if (options.chunk_bytes < 0) fail(ErrorKind::kValue, "chunk_bytes is ", options.chunk_bytes, ", expected 0 (a whole layer) or more");
  return std::make_unique<CudaCopyEngine>(device, slots, std::move(options), std::move(calls));
}

std::unique_ptr<CopyEngine> make_cuda_copy_engine(int device, int slots, CopyOptions options) {
  return make_cuda_copy_engine(device, slots, std::move(options), make_cuda_calls());
}

}  // namespace nybble
