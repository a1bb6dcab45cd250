// The one exception type of the library. Every message says what was found, what was expected and what to do.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace nybble {

enum class ErrorKind : uint8_t {
  kValue,        // an argument's value or shape is wrong            -> Python ValueError
  kType,         // an argument's dtype or kind is wrong             -> Python TypeError
  kFormat,       // a file's bytes are not what its format promises  -> Python ValueError
  kIo,           // the operating system refused                     -> Python OSError
  kOutOfMemory,  // host or device memory                            -> torch.OutOfMemoryError or MemoryError
  kUnsupported,  // asked for something this build or card lacks     -> Python NotImplementedError
  kStaleWeight,  // a slot holds another weight than the one named   -> nybble.StaleWeightError
  kCuda,         // a CUDA call failed                               -> Python RuntimeError
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

// Joins its arguments with operator<< and throws. Usage: fail(ErrorKind::kValue, "block size ", bs, ", expected a power of two").
template <typename... Parts>
[[noreturn]] void fail(ErrorKind kind, const Parts&... parts);

}  // namespace nybble

#include <sstream>

template <typename... Parts>
[[noreturn]] void nybble::fail(ErrorKind kind, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Error(kind, text.str());
}
