#include "stream/host_pages.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "nybble/error.h"

namespace nybble {

SharedFile::SharedFile() : file_(memfd_create("nybble", MFD_CLOEXEC)) {
  if (file_ < 0) fail(ErrorKind::kIo, "no shared memory for the host arena: ", std::strerror(errno));
}

SharedFile::SharedFile(int file) : file_(file), attached_(true) {}

SharedFile::~SharedFile() { close(file_); }

int64_t SharedFile::extend(int64_t bytes) {
  const int64_t begin = end_;
  struct stat info {};
  if (fstat(file_, &info) != 0) fail(ErrorKind::kIo, "the shared host arena cannot be read: ", std::strerror(errno));
  if (attached_ && info.st_size < begin + bytes)
    fail(ErrorKind::kValue, "the shared host arena has ", info.st_size, " bytes, expected at least ", begin + bytes,
         "; do all processes stream the same store?");
  if (!attached_ && ftruncate(file_, begin + bytes) != 0)
    fail(ErrorKind::kOutOfMemory, "the shared host arena could not grow to ", begin + bytes, " bytes: ", std::strerror(errno));
  end_ += bytes;
  return begin;
}

HostPages::HostPages(int64_t bytes, SharedFile* file) : bytes_(bytes), shared_(file != nullptr) {
  const int64_t offset = shared_ ? file->extend(bytes) : 0;
  const int flags = shared_ ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  // Writable also where another process fills it: read-only pages can't be page-locked on every system.
  void* const address = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, flags, shared_ ? file->file() : -1, offset);
  if (address == MAP_FAILED)
    fail(ErrorKind::kOutOfMemory, "the host arena could not get ", bytes, " bytes for a layer; free memory, or stream a smaller model");
  data_ = static_cast<std::byte*>(address);
}

HostPages::~HostPages() {
  if (from_locker_) {
    locker_->free(data_);
  } else {
    if (locker_) locker_->unlock(data_);
    munmap(data_, static_cast<size_t>(bytes_));
  }
}

std::string HostPages::pin(const std::shared_ptr<HostLocker>& locker) {
  const std::string refused = locker->lock(data_, bytes_);
  if (refused.empty()) {
    locker_ = locker;
    return "";
  }
  if (shared_) return refused;  // a copy would not be shared
  void* moved = nullptr;
  const std::string also_refused = locker->allocate(bytes_, &moved);
  if (!also_refused.empty()) return refused + "; " + also_refused;
  std::memcpy(moved, data_, static_cast<size_t>(bytes_));
  munmap(data_, static_cast<size_t>(bytes_));
  data_ = static_cast<std::byte*>(moved);
  locker_ = locker;
  from_locker_ = true;
  return "";
}

}  // namespace nybble
