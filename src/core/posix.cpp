#include "core/posix.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "nybble/error.h"

namespace nybble::posix {
namespace {

[[noreturn]] void fail_errno(const char* action, const Path& path, int error) {
  fail(ErrorKind::kIo, action, " ", path.string(), ": ", std::strerror(error));
}

int open_checked(const Path& path, int flags) {
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC, 0644);
  if (fd < 0) fail_errno("cannot open", path, errno);
  return fd;
}

struct stat stat_checked(int fd, const Path& path) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) fail_errno("cannot stat", path, errno);
  return info;
}

// Of the process's control group, without the file cache that the kernel drops when memory is asked for.
int64_t group_used_bytes() {
  int64_t used = 0;
  for (const char* file : {"/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes"}) {
    if (std::ifstream group(file); group >> used) break;
  }
  for (const char* file : {"/sys/fs/cgroup/memory.stat", "/sys/fs/cgroup/memory/memory.stat"}) {
    std::ifstream stat(file);
    std::string key;
    for (int64_t bytes = 0; stat >> key >> bytes;) {
      if (key == "inactive_file" || key == "active_file") used -= bytes;
    }
  }
  return used;
}

// The process of a program, or nothing when there is none of that name.
std::optional<pid_t> start(const std::vector<std::string>& command, const posix_spawn_file_actions_t* actions) {
  std::vector<char*> arguments;
  for (const std::string& part : command) arguments.push_back(const_cast<char*>(part.c_str()));
  arguments.push_back(nullptr);
  pid_t child = 0;
  const int error = ::posix_spawnp(&child, arguments[0], actions, nullptr, arguments.data(), environ);
  if (error == ENOENT) return std::nullopt;
  if (error != 0) fail_errno("cannot run", command[0], error);
  return child;
}

int wait_for(pid_t child, const std::string& program) {
  int status = 0;
  while (::waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) fail_errno("cannot wait for", program, errno);
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

FileMap::FileMap(const Path& path) {
  const int fd = open_checked(path, O_RDONLY);
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    fail(ErrorKind::kIo, path.string(), " is not a regular file");
  }
  const auto size = static_cast<size_t>(info.st_size);
  if (size == 0) {
    ::close(fd);
    return;
  }
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  const int error = errno;
  ::close(fd);
  if (address == MAP_FAILED) fail_errno("cannot map", path, error);
  bytes_ = {static_cast<const std::byte*>(address), size};
}

FileMap::~FileMap() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

FileMap::FileMap(FileMap&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

FileMap& FileMap::operator=(FileMap&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

void FileMap::release(std::span<const std::byte> range) const {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(range.data()) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(range.data()) + range.size()) / page * page;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

AtomicFile::AtomicFile(Path path) : path_(std::move(path)), temporary_(path_.string() + kTemporarySuffix) {
  fd_ = open_checked(temporary_, O_WRONLY | O_CREAT | O_TRUNC);
}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::write_at(int64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(fd_, bytes.data(), bytes.size(), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      const int error = written < 0 ? errno : ENOSPC;
      fail(ErrorKind::kIo, "cannot write ", bytes.size(), " bytes to ", temporary_.string(), ": ", std::strerror(error), " (",
           free_bytes(path_.parent_path()), " bytes free there)");
    }
    bytes = bytes.subspan(static_cast<size_t>(written));
    offset += written;
  }
}

void AtomicFile::commit(int64_t size) {
  if (::ftruncate(fd_, size) != 0) fail_errno("cannot set the size of", temporary_, errno);
  if (::fsync(fd_) != 0) fail_errno("cannot flush", temporary_, errno);
  ::close(std::exchange(fd_, -1));
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary_.c_str());
    fail_errno("cannot rename to", path_, error);
  }
  sync_folder(path_.parent_path());
}

void write_file(const Path& path, std::string_view text) {
  AtomicFile file(path);
  file.write_at(0, std::as_bytes(std::span(text)));
  file.commit(static_cast<int64_t>(text.size()));
}

std::string read_file(const Path& path, int64_t max_bytes) {
  const FileMap map(path);
  if (static_cast<int64_t>(map.bytes().size()) > max_bytes) {
    fail(ErrorKind::kFormat, path.string(), " has ", map.bytes().size(), " bytes, expected at most ", max_bytes);
  }
  return {reinterpret_cast<const char*>(map.bytes().data()), map.bytes().size()};
}

void rename_durably(const Path& from, const Path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    fail(ErrorKind::kIo, "cannot rename ", from.string(), " to ", to.string(), ": ", std::strerror(errno));
  }
  sync_folder(to.parent_path());
}

void sync_folder(const Path& folder) {
  const Path path = folder.empty() ? Path(".") : folder;
  const int fd = open_checked(path, O_RDONLY | O_DIRECTORY);
  const int status = ::fsync(fd);
  const int error = errno;
  ::close(fd);
  // Some network and FUSE file systems refuse to flush a folder; their renames are as durable as they get.
  if (status != 0 && error != EINVAL && error != ENOSYS && error != EBADF) fail_errno("cannot flush the folder", path, error);
}

std::optional<FolderLock> FolderLock::try_lock(const Path& folder) {
  const int fd = open_checked(folder, O_RDONLY | O_DIRECTORY);
  if (::flock(fd, LOCK_EX | LOCK_NB) == 0) return FolderLock(fd);
  const int error = errno;
  ::close(fd);
  if (error == EWOULDBLOCK) return std::nullopt;
  fail_errno("cannot lock", folder, error);
}

FolderLock::~FolderLock() {
  if (fd_ >= 0) ::close(fd_);
}

FolderLock::FolderLock(FolderLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

bool FolderLock::still_at(const Path& folder) const {
  struct stat there {};
  const struct stat here = stat_checked(fd_, folder);
  return ::stat(folder.c_str(), &there) == 0 && there.st_ino == here.st_ino && there.st_dev == here.st_dev;
}

FileStamp stamp_of(const Path& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) fail_errno("cannot stat", path, errno);
  return {info.st_size, info.st_mtim.tv_sec * int64_t{1'000'000'000} + info.st_mtim.tv_nsec};
}

int64_t free_bytes(const Path& folder) {
  struct statvfs info {};
  if (::statvfs(folder.empty() ? "." : folder.c_str(), &info) != 0) return -1;
  return static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
}

SystemLimits system_limits() {
  SystemLimits limits;
  limits.page_bytes = ::sysconf(_SC_PAGESIZE);
  limits.memory_bytes = ::sysconf(_SC_PHYS_PAGES) * limits.page_bytes;
  limits.available_bytes = ::sysconf(_SC_AVPHYS_PAGES) * limits.page_bytes;
  std::ifstream meminfo("/proc/meminfo");
  std::string key, unit;
  for (int64_t kib = 0; meminfo >> key >> kib; std::getline(meminfo, unit)) {
    if (key == "MemAvailable:") limits.available_bytes = kib * 1024;
  }
  for (const char* file : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    std::ifstream group(file);
    int64_t bytes = 0;
    if (group >> bytes && bytes < limits.memory_bytes) limits.group_limit_bytes = bytes;
  }
  if (limits.group_limit_bytes >= 0) limits.group_available_bytes = std::max<int64_t>(0, limits.group_limit_bytes - group_used_bytes());
  struct rlimit lock {};
  if (::getrlimit(RLIMIT_MEMLOCK, &lock) == 0 && lock.rlim_cur != RLIM_INFINITY) {
    limits.lockable_bytes = static_cast<int64_t>(std::min<rlim_t>(lock.rlim_cur, INT64_MAX));
  }
  return limits;
}

bool is_terminal(int fd) { return ::isatty(fd) == 1; }

int run_program(const std::vector<std::string>& command) {
  const std::optional<pid_t> child = start(command, nullptr);
  return child ? wait_for(*child, command[0]) : kNoProgram;
}

Output capture_program(const std::vector<std::string>& command) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) fail_errno("cannot make a pipe for", command[0], errno);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  std::optional<pid_t> child;
  try {
    child = start(command, &actions);
  } catch (...) {
    posix_spawn_file_actions_destroy(&actions);
    ::close(ends[0]);
    ::close(ends[1]);
    throw;
  }
  posix_spawn_file_actions_destroy(&actions);
  ::close(ends[1]);
  Output output;
  char buffer[4096];
  for (ssize_t got; (got = ::read(ends[0], buffer, sizeof buffer)) != 0;) {
    if (got > 0) output.text.append(buffer, static_cast<size_t>(got));
    if (got < 0 && errno != EINTR) break;
  }
  ::close(ends[0]);
  output.exit_code = child ? wait_for(*child, command[0]) : kNoProgram;
  return output;
}

}  // namespace nybble::posix
