// Output buffers that start as poison and have guard bytes around them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace nybble::test {

// `count` values at a chosen byte offset from a 64-byte boundary, all bytes 0xFF (a NaN in every float format), 64 guard bytes on each
// side.
template <typename T>
class Guarded {
 public:
  explicit Guarded(int64_t count, int64_t misalignment = 0) : bytes_(count * static_cast<int64_t>(sizeof(T))) {
    storage_.assign(bytes_ + 2 * kGuard + 128, kGuardByte);
    const auto address = reinterpret_cast<uintptr_t>(storage_.data()) + kGuard;
    begin_ = kGuard + static_cast<int64_t>((64 - address % 64) % 64) + misalignment;
    std::memset(storage_.data() + begin_, 0xFF, bytes_);
  }
  T* data() { return reinterpret_cast<T*>(storage_.data() + begin_); }
  const T* data() const { return reinterpret_cast<const T*>(storage_.data() + begin_); }

  bool guards_intact() const {
    const auto intact = [](uint8_t byte) { return byte == kGuardByte; };
    return std::all_of(storage_.begin(), storage_.begin() + begin_, intact) &&
           std::all_of(storage_.begin() + begin_ + bytes_, storage_.end(), intact);
  }

 private:
  static constexpr int64_t kGuard = 64;
  static constexpr uint8_t kGuardByte = 0xA5;
  int64_t bytes_;
  int64_t begin_ = 0;
  std::vector<uint8_t> storage_;
};

}  // namespace nybble::test
