// Host memory of the arena: whole pages, private or of a file that processes share. Everything that asks the operating system is in
// host_pages.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "nybble/host_arena.h"

namespace nybble {

// An anonymous file. Ranges follow each other in the order in which they are asked for.
class SharedFile {
 public:
  SharedFile();                   // a new one
  explicit SharedFile(int file);  // another process's, open here; takes the descriptor
  ~SharedFile();
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  int64_t extend(int64_t bytes);  // where the next range begins; throws kValue when another process's file has no such range
  int file() const { return file_; }
  bool attached() const { return attached_; }

 private:
  int file_ = -1;
  bool attached_ = false;
  int64_t end_ = 0;
};

// Page-aligned memory of exactly `bytes`, zero at first; pages cost nothing until they are written.
class HostPages {
 public:
  HostPages(int64_t bytes, SharedFile* file);  // file: null for private memory
  ~HostPages();
  HostPages(const HostPages&) = delete;
  HostPages& operator=(const HostPages&) = delete;

  std::byte* data() const { return data_; }
  bool pinned() const { return locker_ != nullptr; }
  // Page-locks the pages, or moves private ones into the locker's memory. Why not, when they stay pageable as they were.
  std::string pin(const std::shared_ptr<HostLocker>& locker);

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  bool shared_ = false;
  std::shared_ptr<HostLocker> locker_;  // set: page-locked
  bool from_locker_ = false;
};

}  // namespace nybble
