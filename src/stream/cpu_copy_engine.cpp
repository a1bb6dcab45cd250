#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "nybble/stream.h"

namespace nybble {
namespace {

constexpr int64_t kDefaultChunkBytes = int64_t{4} << 20;
constexpr auto kLongestWait = std::chrono::hours(24);

enum class Phase : uint8_t { kIdle, kDeferred, kQueued, kCopying, kLanded, kFailed };

struct SlotCopy {
  Phase phase = Phase::kIdle;
  CopyRequest request;
  std::exception_ptr error;
  std::atomic<bool> stop{false};
};

// One thread copies in the order of issue.
class CopyThread {
 public:
  CopyThread(int slots, CopyOptions options)
      : options_(std::move(options)), slots_(static_cast<size_t>(slots)), thread_([this] { work(); }) {}

  ~CopyThread() {
    {
      const std::lock_guard lock(mutex_);
      quit_ = true;
      for (SlotCopy& slot : slots_) slot.stop = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void start(const CopyRequest& request) {
    if (request.poison) std::memset(request.to, 0xFF, static_cast<size_t>(request.bytes));
    const std::lock_guard lock(mutex_);
    SlotCopy& slot = at(request.slot);
    slot.request = request;
    slot.error = nullptr;
    slot.stop = false;
    slot.phase = Phase::kDeferred;
    if (!options_.land_at_wait) enqueue(slot);
  }

  bool wait_ready(int index, std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    SlotCopy& slot = at(index);
    if (slot.phase == Phase::kIdle) fail(ErrorKind::kValue, "no refill of slot ", index, " is under way; start one before waiting for it");
    if (slot.phase == Phase::kDeferred) enqueue(slot);
    const auto ended = [&] { return slot.phase == Phase::kLanded || slot.phase == Phase::kFailed; };
    const auto longest = std::min<std::chrono::milliseconds>(timeout, kLongestWait);
    if (!changed_.wait_for(lock, longest, ended)) return false;
    if (slot.phase == Phase::kLanded) return true;
    slot.phase = Phase::kIdle;
    std::rethrow_exception(std::exchange(slot.error, nullptr));
  }

  void cancel(int index) {
    std::unique_lock lock(mutex_);
    SlotCopy& slot = at(index);
    slot.stop = true;
    if (slot.phase == Phase::kQueued) std::erase(queue_, index);
    changed_.notify_all();
    changed_.wait(lock, [&] { return slot.phase != Phase::kCopying; });
    slot.phase = Phase::kIdle;
    slot.error = nullptr;
  }

 private:
  SlotCopy& at(int index) { return slots_[static_cast<size_t>(index)]; }

  void enqueue(SlotCopy& slot) {
    slot.phase = Phase::kQueued;
    queue_.push_back(slot.request.slot);
    changed_.notify_all();
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return quit_ || !queue_.empty(); });
      if (quit_) return;
      SlotCopy& slot = at(queue_.front());
      queue_.pop_front();
      slot.phase = Phase::kCopying;
      if (options_.delay.count() > 0) changed_.wait_for(lock, options_.delay, [&] { return slot.stop.load(); });
      lock.unlock();
      std::exception_ptr error;
      try {
        copy(slot);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      slot.error = error;
      slot.phase = error ? Phase::kFailed : Phase::kLanded;
      changed_.notify_all();
    }
  }

  void copy(const SlotCopy& slot) const {
    const CopyRequest& request = slot.request;
    for (int64_t begin = 0; begin < request.bytes; begin += options_.chunk_bytes) {
      const int64_t end = std::min(begin + options_.chunk_bytes, request.bytes);
      if (slot.stop)
        fail(ErrorKind::kIo, "the refill of slot ", request.slot, " with layer ", request.layer, " was stopped at byte ", begin);
      if (options_.observer) options_.observer(request.layer, request.slot, begin, end);
      std::memcpy(request.to + begin, request.from + begin, static_cast<size_t>(end - begin));
    }
  }

  const CopyOptions options_;
  std::deque<SlotCopy> slots_;  // a deque: elements never move
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<int> queue_;
  bool quit_ = false;
  std::thread thread_;
};

// Compute on the CPU is finished when its call returns, so "free" needs no event.
class CpuCopyEngine final : public CopyEngine {
 public:
  CpuCopyEngine(int slots, CopyOptions options) : pid_(getpid()), thread_(std::make_unique<CopyThread>(slots, std::move(options))) {}
  ~CpuCopyEngine() override {
    if (forked()) static_cast<void>(thread_.release());  // the thread exists in the parent only, its locks are in an unknown state
  }

  void record_free(int, ComputeStream) override {}
  void start(const CopyRequest& request, ComputeStream) override { require_thread().start(request); }
  bool wait_ready(int slot, ComputeStream, std::chrono::milliseconds timeout) override {
    return require_thread().wait_ready(slot, timeout);
  }
  void cancel(int slot) noexcept override {
    if (!forked()) thread_->cancel(slot);
  }

 private:
  bool forked() const { return pid_ != getpid(); }
  CopyThread& require_thread() const {
    if (forked())
      fail(ErrorKind::kUnsupported,
           "this process was forked from the one that streams, so its copy thread does not exist here; stream again in this process");
    return *thread_;
  }

  const pid_t pid_;
  std::unique_ptr<CopyThread> thread_;
};

}  // namespace

std::unique_ptr<CopyEngine> make_cpu_copy_engine(int slots, CopyOptions options) {
  if (slots < 1) fail(ErrorKind::kValue, "a copy engine for ", slots, " slots, expected at least 1");
  if (options.chunk_bytes < 0) fail(ErrorKind::kValue, "chunk_bytes is ", options.chunk_bytes, ", expected 0 (the default) or more");
  if (options.chunk_bytes == 0) options.chunk_bytes = kDefaultChunkBytes;
  return std::make_unique<CpuCopyEngine>(slots, std::move(options));
}

}  // namespace nybble
