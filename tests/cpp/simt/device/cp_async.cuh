// The CPU's twin of src/device/cp_async.cuh.
#pragma once

#include "device/ptx.cuh"

namespace nybble::device {

inline void copy_async_if(uint32_t destination, const void* source, int index, int count) {
  if (index < count) simt::copy_async(destination, source, 16, 16);
}
inline void copy_async_fill_if(uint32_t destination, const void* source, uint32_t bytes, int index, int count) {
  if (index < count) simt::copy_async(destination, source, 16, static_cast<int>(bytes));
}
inline void copy_async_fill_16b(uint32_t destination, const void* source, uint32_t bytes) {
  simt::copy_async(destination, source, 16, static_cast<int>(bytes));
}
inline void copy_async_fill_4b(uint32_t destination, const void* source, uint32_t bytes) {
  simt::copy_async(destination, source, 4, static_cast<int>(bytes));
}
inline void commit_copies() { simt::commit_copies(); }
template <int PENDING>
void wait_copies() {
  simt::wait_copies(PENDING);
}

}  // namespace nybble::device
