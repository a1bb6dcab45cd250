// A pwrite that stands before the C library's and fails with ENOSPC after a budget of bytes: linked into a test, or preloaded into the
// command with the budget in NYBBLE_TEST_DISK_BYTES.
#include "store/full_disk.h"

#include <dlfcn.h>
#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <limits>

namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

std::atomic<int64_t>& budget() {
  static std::atomic<int64_t> bytes{std::getenv("NYBBLE_TEST_DISK_BYTES") ? std::atoll(std::getenv("NYBBLE_TEST_DISK_BYTES")) : kUnlimited};
  return bytes;
}
std::atomic<int> cut_writes{0};

}  // namespace

namespace nybble::full_disk {

void set_budget(int64_t bytes) { budget() = bytes; }
void lift() { budget() = kUnlimited; }
int cuts() { return cut_writes; }

}  // namespace nybble::full_disk

extern "C" __attribute__((visibility("default"))) ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  using Function = ssize_t (*)(int, const void*, size_t, off_t);
  static const auto real = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "pwrite"));
  const int64_t left = budget();
  if (left <= 0) {
    errno = ENOSPC;
    return -1;
  }
  // A disk that fills up writes what still fits.
  const auto allowed = static_cast<size_t>(std::min<int64_t>(left, static_cast<int64_t>(size)));
  if (allowed < size) cut_writes++;
  const ssize_t written = real(fd, data, allowed, offset);
  if (written > 0 && left != kUnlimited) budget() -= written;
  return written;
}
