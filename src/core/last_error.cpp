#include "core/last_error.h"

#include <new>
#include <string>

namespace nybble {
namespace {

thread_local std::string text;
thread_local int kind_code = -1;

ErrorKind record(ErrorKind kind, std::string_view what) {
  text = what;
  kind_code = static_cast<int>(kind);
  return kind;
}

}  // namespace

ErrorKind record_current_exception() {
  try {
    throw;
  } catch (const Error& error) {
    return record(error.kind(), error.what());
  } catch (const std::bad_alloc&) {
    return record(ErrorKind::kOutOfMemory, "out of host memory");
  } catch (const std::invalid_argument& error) {
    return record(ErrorKind::kValue, error.what());
  } catch (const std::exception& error) {
    return record(ErrorKind::kCuda, error.what());
  } catch (...) {
    return record(ErrorKind::kCuda, "an exception of an unknown type");
  }
}

const char* last_error_text() { return text.c_str(); }
int last_error_kind() { return kind_code; }

int run_recorded(const std::function<void()>& body) noexcept {
  try {
    body();
    return 0;
  } catch (...) {
    return 1 + static_cast<int>(record_current_exception());
  }
}

}  // namespace nybble
