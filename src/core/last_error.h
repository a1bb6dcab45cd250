// The failure that the C ABI and the torch ops report, kept per thread.
#pragma once

#include <functional>
#include <string_view>

#include "nybble/error.h"

namespace nybble {

// The ErrorKind in flight, for a catch block: an Error's own, kOutOfMemory for bad_alloc, kValue for invalid_argument, kCuda otherwise.
ErrorKind record_current_exception();
const char* last_error_text();
int last_error_kind();  // -1 before the first

// Runs body for a C function: 0, or nonzero once what it threw is recorded.
int run_recorded(const std::function<void()>& body) noexcept;

}  // namespace nybble
