// Streaming: host arena, slot ring and schedule. No Python, no torch: the CUDA copy engine and the CPU engine drive the same state machine.
#pragma once

#include <cstdint>

#include "nybble/error.h"

namespace nybble {

// Owner of a slot that holds no weight.
constexpr int64_t kNobody = -1;

// Checks before every launch that each pointer of a weight lies in a slot that weight `uid` owns (DESIGN S3).
// Pointers outside every registered slot are an error of their own ("left the ring"). Throws kStaleWeight. Thread safe, lock free to
// readers.
void verify_owner(int64_t uid, const void* const* pointers, int count);

}  // namespace nybble
