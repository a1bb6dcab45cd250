// The operating-system calls of the store: mapping, durable writes, locks, limits. POSIX; another system gets a file of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace nybble::posix {

using Path = std::filesystem::path;

// A file mapped for reading. Bytes stay valid for the life of the object; a file that another process truncates meanwhile raises SIGBUS.
class FileMap {
 public:
  explicit FileMap(const Path& path);  // throws kIo
  ~FileMap();
  FileMap(FileMap&& other) noexcept;
  FileMap& operator=(FileMap&& other) noexcept;

  std::span<const std::byte> bytes() const { return bytes_; }
  // Drops the pages of a range from this process, so that resident memory stays bounded; they are read again when touched.
  void release(std::span<const std::byte> range) const;

 private:
  std::span<const std::byte> bytes_;
};

// A file that appears under its name whole or not at all: written as NAME.tmp, then fsync, rename, fsync of the folder.
// Destroyed without commit(), it removes NAME.tmp.
class AtomicFile {
 public:
  explicit AtomicFile(Path path);  // truncates a NAME.tmp that a killed run left behind
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  // Writes all of `bytes` at `offset`. Throws kIo with the file, the system's reason and the space left.
  void write_at(int64_t offset, std::span<const std::byte> bytes);
  void commit(int64_t size);

 private:
  Path path_;
  Path temporary_;
  int fd_ = -1;
};
constexpr const char* kTemporarySuffix = ".tmp";

void write_file(const Path& path, std::string_view text);  // through AtomicFile
std::string read_file(const Path& path, int64_t max_bytes);

// Renames and makes the rename durable. `to` must not exist, or be an empty folder.
void rename_durably(const Path& from, const Path& to);
void sync_folder(const Path& folder);

// An exclusive advisory lock on a folder, held until destruction; it follows the folder through renames and ends with the process.
class FolderLock {
 public:
  static std::optional<FolderLock> try_lock(const Path& folder);  // empty when another process holds it
  ~FolderLock();
  FolderLock(FolderLock&& other) noexcept;
  FolderLock& operator=(FolderLock&&) = delete;
  // False once the path names another folder or none: a process that waited for the lock must look again.
  bool still_at(const Path& folder) const;

 private:
  explicit FolderLock(int fd) : fd_(fd) {}
  int fd_ = -1;
};

// Sizes and times that tell one version of a file from another.
struct FileStamp {
  int64_t bytes = 0;
  int64_t modified_ns = 0;
};
FileStamp stamp_of(const Path& path);
int64_t free_bytes(const Path& folder);  // for an unprivileged user; -1 when the system does not say

struct SystemLimits {
  int64_t page_bytes = 0;
  int64_t memory_bytes = 0;            // physical
  int64_t available_bytes = 0;         // what the kernel would give without swapping
  int64_t group_limit_bytes = -1;      // control group, -1 = none
  int64_t group_available_bytes = -1;  // of the limit, what is not in use; file cache counts as free
  int64_t lockable_bytes = -1;         // RLIMIT_MEMLOCK, -1 = unlimited
};
SystemLimits system_limits();
bool is_terminal(int fd);

// Runs a program found on PATH with our input, output and environment, and waits for it: its exit code, 128 + signal when it was killed,
// kNoProgram when there is none of that name.
constexpr int kNoProgram = 127;
int run_program(const std::vector<std::string>& command);

// The same with what it writes to its output collected and its error output dropped.
struct Output {
  int exit_code = 0;
  std::string text;
};
Output capture_program(const std::vector<std::string>& command);

}  // namespace nybble::posix
