// A CUDA runtime in host memory that finds races. Copies happen at once; what is checked is whether streams and events ordered them: vector
// clocks, as thread sanitizers keep them, one per stream and per recorded event.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "nybble/error.h"
#include "stream/cuda_calls.h"

namespace nybble {

class RaceDetector {
 public:
  using Clock = std::map<const void*, int64_t>;  // stream -> how many of its operations are known to be done
  struct Access {
    const void* stream = nullptr;
    int64_t at = 0;
  };

  void record(const void* event, const void* stream) { events_[event] = streams_[stream]; }
  void wait(const void* stream, const void* event) {
    if (++waits_ == first_skipped_) skipped_stream_ = stream;
    if (waits_ >= first_skipped_ && stream == skipped_stream_ && to_skip_ > 0) {
      to_skip_--;
      return;
    }
    for (const auto& [other, at] : events_[event]) streams_[stream][other] = std::max(streams_[stream][other], at);
  }
  void read(const void* buffer, const void* stream) { touch(buffer, stream, "read", false); }
  void write(const void* buffer, const void* stream) { touch(buffer, stream, "write", true); }

  int waits() const { return waits_; }
  // A control: leaves out wait `which` (1-based) and the next count - 1 waits of the same stream.
  void skip_waits(int which, int count) { first_skipped_ = which, to_skip_ = count; }
  const std::vector<std::string>& races() const { return races_; }

 private:
  void touch(const void* buffer, const void* stream, const char* what, bool writes) {
    Clock& clock = streams_[stream];
    std::vector<Access>& reads = reads_[buffer];
    const auto unordered = [&](const Access& before) { return before.stream != stream && clock[before.stream] < before.at; };
    if (const auto last = writes_.find(buffer); last != writes_.end() && unordered(last->second))
      races_.push_back(std::string(what) + " not ordered after a write");
    if (writes) {
      for (const Access& before : reads) {
        if (unordered(before)) races_.push_back("write not ordered after a read");
      }
      reads.clear();
    }
    const Access access{stream, ++clock[stream]};
    if (writes)
      writes_[buffer] = access;
    else
      reads.push_back(access);
  }

  std::map<const void*, Clock> streams_;
  std::map<const void*, Clock> events_;
  std::map<const void*, std::vector<Access>> reads_;
  std::map<const void*, Access> writes_;
  std::vector<std::string> races_;
  int waits_ = 0;
  int first_skipped_ = 1 << 30;
  int to_skip_ = 0;
  const void* skipped_stream_ = nullptr;
};

// What an engine made on the fake runtime, seen from outside; outlives the engine.
struct FakeRuntime {
  RaceDetector detector;
  std::vector<std::string> log;  // "copy 4096", "fill", "finish", ...
  std::set<void*> live;          // streams and events that were not destroyed
  int device = 0;
  int fail_at_create = -1;  // the how manieth stream or event can't be made
  bool capturing = false;
  int64_t made = 0;

  int count(const std::string& what) const {
    int found = 0;
    for (const std::string& line : log) found += line.rfind(what, 0) == 0;
    return found;
  }
};

class FakeCalls final : public CudaCalls {
 public:
  explicit FakeCalls(FakeRuntime& runtime) : runtime_(runtime) {}

  int set_device(int ordinal) override { return std::exchange(runtime_.device, ordinal); }
  void restore_device(int ordinal) noexcept override { runtime_.device = ordinal; }
  ComputeStream create_stream() override { return create(); }
  void destroy_stream(ComputeStream stream) noexcept override { runtime_.live.erase(stream); }
  CudaEvent create_event() override { return create(); }
  void destroy_event(CudaEvent event) noexcept override { runtime_.live.erase(event); }
  void record(CudaEvent event, ComputeStream stream) override { runtime_.detector.record(event, stream); }
  void wait(ComputeStream stream, CudaEvent event) override { runtime_.detector.wait(stream, event); }
  void copy(void* to, const void* from, int64_t bytes, ComputeStream stream) override {
    runtime_.detector.write(to, stream);
    runtime_.log.push_back("copy " + std::to_string(bytes));
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  void fill(void* to, int value, int64_t bytes, ComputeStream stream) override {
    runtime_.detector.write(to, stream);
    runtime_.log.push_back("fill");
    std::memset(to, value, static_cast<size_t>(bytes));
  }
  void sleep(std::chrono::microseconds time, ComputeStream) override { runtime_.log.push_back("sleep " + std::to_string(time.count())); }
  void finish(ComputeStream) override { runtime_.log.push_back("finish"); }
  bool capturing(ComputeStream) override { return runtime_.capturing; }

 private:
  void* create() {
    if (runtime_.made == runtime_.fail_at_create) fail(ErrorKind::kOutOfMemory, "injected");
    void* const handle = reinterpret_cast<void*>(0x1000 + ++runtime_.made * 0x10);
    runtime_.live.insert(handle);
    return handle;
  }

  FakeRuntime& runtime_;
};

inline std::unique_ptr<CopyEngine> make_fake_cuda_engine(FakeRuntime& runtime, int slots, CopyOptions options = {}) {
  return make_cuda_copy_engine(0, slots, std::move(options), std::make_unique<FakeCalls>(runtime));
}

}  // namespace nybble
