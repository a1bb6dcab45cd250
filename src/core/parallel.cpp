#include "core/parallel.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace nybble {
namespace {

thread_local bool inside_parallel_for = false;

// One call's work. Chunks are handed out by an atomic counter; the last worker to leave wakes the caller.
struct Job {
  int64_t count = 0;
  int64_t grain = 1;
  const std::function<void(int64_t, int64_t)>* body = nullptr;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  std::mutex error_mutex;

  void run() {
    inside_parallel_for = true;
    for (;;) {
      const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= count || failed.load(std::memory_order_relaxed)) break;
      try {
        (*body)(begin, std::min(begin + grain, count));
      } catch (...) {
        const std::lock_guard lock(error_mutex);
        if (!error) error = std::current_exception();
        failed = true;
      }
    }
    inside_parallel_for = false;
  }
};

// Workers sleep between jobs. One job at a time: a second caller runs its job alone.
class Team {
 public:
  explicit Team(int workers) : pid_(getpid()) {
    for (int i = 0; i < workers; i++) threads_.emplace_back([this] { work(); });
  }
  ~Team() {
    if (!alive()) {  // a forked child: the threads exist in the parent only
      for (auto& thread : threads_) thread.detach();
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  bool alive() const { return pid_ == getpid(); }
  int workers() const { return static_cast<int>(threads_.size()); }

  void run(Job& job) {
    {
      const std::lock_guard lock(mutex_);
      job_ = &job;
      generation_++;
      busy_ = workers();
    }
    wake_.notify_all();
    job.run();
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
    job_ = nullptr;
  }

 private:
  void work() {
    uint64_t seen = 0;
    for (;;) {
      Job* job = nullptr;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
        if (stop_) return;
        seen = generation_;
        job = job_;
      }
      job->run();
      const std::lock_guard lock(mutex_);
      if (--busy_ == 0) done_.notify_one();
    }
  }

  const pid_t pid_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  Job* job_ = nullptr;
  uint64_t generation_ = 0;
  int busy_ = 0;
  bool stop_ = false;
};

std::atomic<int> wanted_threads{static_cast<int>(std::max(1u, std::thread::hardware_concurrency()))};
std::mutex team_mutex;
std::unique_ptr<Team> team;

}  // namespace

void set_num_threads(int count) { wanted_threads = std::max(1, count); }
int num_threads() { return wanted_threads; }

void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  if (count <= 0) return;
  Job job;
  job.count = count;
  job.grain = std::max<int64_t>(1, grain);
  job.body = &body;
  const int workers = num_threads() - 1;
  std::unique_lock lock(team_mutex, std::defer_lock);
  if (workers == 0 || count <= job.grain || inside_parallel_for || !lock.try_lock()) {
    const bool nested = inside_parallel_for;
    job.run();
    inside_parallel_for = nested;
  } else {
    if (!team || !team->alive() || team->workers() != workers) team = std::make_unique<Team>(workers);
    team->run(job);
  }
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace nybble
