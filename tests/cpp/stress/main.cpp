// linear_stress: random multiplies by every fused kernel, on several streams, each output compared with float64. In a build with fault
// switches it also plants a fault and delays (device/fault.h), which must end it with code 1 or 3.
//
//   linear_stress [--kernels hopper,hopper_rows,...] [--cases N] [--streams N] [--size F] [--seed N] [--seconds S] [--hang-seconds S]
//                 [--batch N] [--poison 0|1] [--fault NAME[,NAME]] [--delay-odds N] [--delay-ns N]
//
// Exit: 0 all right, 1 a wrong output, 2 usage or no GPU, 3 a stream hung, 4 a CUDA error.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <thread>

#include "device/fault.h"
#include "nybble/cuda.h"
#include "nybble/error.h"
#include "stress/worker.h"

namespace nybble::stress {
namespace {

enum ExitCode { kRight = 0, kWrong = 1, kUsage = 2, kHang = 3, kCudaError = 4 };

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  return parts;
}

struct Plant {
  std::vector<std::string> faults;
  unsigned delay_odds = 0, delay_ns = 1;
};

void plant(const Plant& wanted) {
#ifdef NYBBLE_FAULT_SWITCHES
  fault::Switches switches{0, wanted.delay_odds, std::max(1u, wanted.delay_ns)};
  for (const std::string& text : wanted.faults) {
    unsigned bit = 0;
    while (bit < std::size(fault::kNames) && text != fault::kNames[bit]) bit++;
    if (bit == std::size(fault::kNames)) fail(ErrorKind::kValue, "no fault is named ", text, "; device/fault.h lists them");
    switches.faults |= 1u << bit;
  }
  fault::set(switches);
#else
  if (!wanted.faults.empty() || wanted.delay_odds != 0) {
    fail(ErrorKind::kUnsupported, "faults and delays in a build without NYBBLE_FAULT_SWITCHES");
  }
#endif
}

void read_arguments(int argc, char** argv, Options& o, Plant& p) {
  std::string kernels;
  for (int i = 1; i < argc; i += 2) {
    const std::string key = argv[i];
    if (i + 1 == argc) fail(ErrorKind::kValue, key, " without a value");
    const char* value = argv[i + 1];
    if (key == "--kernels")
      kernels = value;
    else if (key == "--cases")
      o.cases = std::atoll(value);
    else if (key == "--streams")
      o.streams = std::atoi(value);
    else if (key == "--batch")
      o.batch = std::atoi(value);
    else if (key == "--size")
      o.size = std::atof(value);
    else if (key == "--seed")
      o.seed = std::strtoull(value, nullptr, 0);
    else if (key == "--seconds")
      o.seconds = std::atof(value);
    else if (key == "--hang-seconds")
      o.hang_seconds = std::atof(value);
    else if (key == "--poison")
      o.poison = std::atoi(value) != 0;
    else if (key == "--fault")
      p.faults = split(value);
    else if (key == "--delay-odds")
      p.delay_odds = static_cast<unsigned>(std::atoi(value));
    else if (key == "--delay-ns")
      p.delay_ns = static_cast<unsigned>(std::atoi(value));
    else
      fail(ErrorKind::kValue, "unknown option ", key, "; the head of tests/cpp/stress/main.cpp lists them");
  }
  for (const std::string& text : split(kernels)) o.kernels.push_back(kernels_named(text));
  if (kernels.empty()) o.kernels.assign(std::begin(kAllKernels), std::end(kAllKernels));
  if (o.kernels.empty() || o.streams < 1 || o.batch < 1) fail(ErrorKind::kValue, "no kernels, streams or batch");
}

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Leaves without waiting for the device: a kernel that hangs never ends.
[[noreturn]] void leave(ExitCode code) {
  std::fflush(stdout);
  _exit(code);
}

struct Stream {
  std::unique_ptr<Worker> worker;
  std::thread thread;
  std::atomic<bool> ended{false};
};

// At most `batch` of the cases that are left.
int64_t take(std::atomic<int64_t>& left, int64_t batch) {
  int64_t now = left, wanted = 0;
  do {
    wanted = std::clamp<int64_t>(now, 0, batch);
  } while (!left.compare_exchange_weak(now, now - wanted));
  return wanted;
}

void run_stream(const Options& options, Stream& stream, std::atomic<int64_t>& left, Clock::time_point start) {
  Worker& worker = *stream.worker;
  try {
    while (seconds_since(start) < options.seconds) {
      const int64_t wanted = take(left, options.batch), before = worker.done;
      if (wanted == 0) break;
      const bool right = worker.run_batch(static_cast<int>(wanted));
      left += wanted - (worker.done - before);  // cases that dropped out of the batch are still to do
      if (right) continue;
      std::printf("WRONG after %.2f s, %lld cases of this stream: %s\n", seconds_since(start), static_cast<long long>(worker.done.load()),
                  worker.failure().c_str());
      leave(kWrong);
    }
  } catch (const Error& error) {
    std::printf("ERROR after %.2f s: %s\n%s", seconds_since(start), error.what(), worker.latest().c_str());
    leave(kCudaError);
  }
  stream.ended = true;
}

// Returns when all streams have ended; a stream without a sign of life ends the process.
void watch(const Options& options, std::vector<Stream>& streams, Clock::time_point start) {
  std::vector<int64_t> beats(streams.size(), -1);
  std::vector<Clock::time_point> changed(streams.size(), start);
  for (bool running = true; running;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    running = false;
    for (size_t i = 0; i < streams.size(); i++) {
      if (streams[i].ended) continue;
      running = true;
      const int64_t now = streams[i].worker->beats;
      if (now != beats[i]) {
        beats[i] = now;
        changed[i] = Clock::now();
      } else if (seconds_since(changed[i]) > options.hang_seconds) {
        std::printf("HANG after %.2f s: stream %zu gave no sign for %.0f s, its batch:\n%s", seconds_since(start), i, options.hang_seconds,
                    streams[i].worker->latest().c_str());
        leave(kHang);
      }
    }
  }
}

int run(const Options& options, const Plant& wanted) {
  if (cuda_device_count() == 0) fail(ErrorKind::kUnsupported, "no CUDA device");
  const DeviceModel& device = cuda_device_model(0);
  std::printf("%s, seed %llu\n", device.name.c_str(), static_cast<unsigned long long>(options.seed));
  plant(wanted);
  const Pools pools(options.seed);
  std::vector<Stream> streams(static_cast<size_t>(options.streams));
  std::atomic<int64_t> left{options.cases};
  for (size_t i = 0; i < streams.size(); i++) {
    streams[i].worker = std::make_unique<Worker>(options, pools, device, static_cast<int>(i));
  }
  const Clock::time_point start = Clock::now();
  for (Stream& stream : streams) stream.thread = std::thread([&] { run_stream(options, stream, left, start); });
  watch(options, streams, start);
  std::map<std::string, int64_t> counts;
  int64_t done = 0;
  for (Stream& stream : streams) {
    stream.thread.join();
    done += stream.worker->done;
    for (const auto& [key, count] : stream.worker->counts()) counts[key] += count;
  }
  for (const auto& [key, count] : counts) std::printf("  %-30s %6lld\n", key.c_str(), static_cast<long long>(count));
  std::printf("RIGHT: %lld cases on %d streams in %.1f s, every output within its tolerance\n", static_cast<long long>(done),
              options.streams, seconds_since(start));
  return done > 0 ? kRight : kUsage;
}

}  // namespace
}  // namespace nybble::stress

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 1 << 16);
  try {
    nybble::stress::Options options;
    nybble::stress::Plant plant;
    nybble::stress::read_arguments(argc, argv, options, plant);
    return nybble::stress::run(options, plant);
  } catch (const nybble::Error& error) {
    std::fprintf(stderr, "linear_stress: %s\n", error.what());
    return error.kind() == nybble::ErrorKind::kCuda ? nybble::stress::kCudaError : nybble::stress::kUsage;
  }
}
