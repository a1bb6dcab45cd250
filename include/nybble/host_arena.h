// The packed base in host memory, page-locked where a GPU copies from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace nybble {

constexpr int64_t kViewAlignment = 256;    // of a part inside its layer
constexpr int64_t kLayerAlignment = 4096;  // of a layer's blob, address and size

struct ArenaPart {
  std::string name;
  int64_t bytes = 0;
  int64_t offset = 0;  // set by the arena: a multiple of kViewAlignment
};

// Same-shaped layers share one layout object, so that views of a slot are built once per layout.
struct LayerLayout {
  std::vector<ArenaPart> parts;
  int64_t bytes = 0;  // of the blob, a multiple of kLayerAlignment
};

// Page-locked host memory. A refused call returns the reason (empty: done) and leaves no error pending.
class HostLocker {
 public:
  virtual ~HostLocker() = default;
  virtual std::string lock(void* address, int64_t bytes) = 0;  // whole pages, all of them written to before
  virtual void unlock(void* address) noexcept = 0;
  virtual std::string allocate(int64_t bytes, void** address) = 0;
  virtual void free(void* address) noexcept = 0;
};
std::shared_ptr<HostLocker> make_cuda_host_locker();  // throws kUnsupported in a build without CUDA

struct PinReport {
  int64_t bytes = 0;   // page-locked
  std::string reason;  // why the rest is not; empty: all of it is
};

// The packed base in host memory: one contiguous, aligned blob per layer. Not thread safe while layers are added or filled.
class HostArena {
 public:
  HostArena();
  // Bytes in an anonymous file that other processes of this host map too. attach(): the file of another process's arena, open here, whose
  // descriptor it takes; layers, added in the same order with the same parts once that process has filled them, are complete and not
  // filled.
  static std::unique_ptr<HostArena> shared();
  static std::unique_ptr<HostArena> attach(int file);
  int shared_file() const;  // -1: private
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  int add_layer(std::span<const ArenaPart> parts);  // names unique, bytes > 0; returns the layer's index; its bytes are zero
  // Writes bytes at `offset` of a part. A part is complete once every byte was written; streaming an incomplete layer is an error.
  void fill(int layer, int part, int64_t offset, std::span<const std::byte> bytes);
  void require_complete(int layer) const;  // throws kValue naming the first part with missing bytes

  int layers() const;
  int layout_index(int layer) const;  // equal for same-shaped layers
  int layouts() const;
  const LayerLayout& layout(int index) const;
  std::span<const std::byte> blob(int layer) const;
  std::span<std::byte> part(int layer, int part);
  int64_t bytes() const;  // of all blobs
  int64_t largest_layer_bytes() const;

  // Throws kOutOfMemory when the system or the process's control group has less memory available than all blobs need. Before the first
  // fill.
  void require_memory() const;
  // Page-locks the blobs where they are, or moves one into memory that the driver gives; a layer that gets neither, and all after it, stay
  // pageable. After the last fill, and before part() and blob() are asked for: a blob may move.
  PinReport pin(std::shared_ptr<HostLocker> locker);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nybble
