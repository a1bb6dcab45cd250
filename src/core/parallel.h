// A fixed team of threads for CPU kernels. Work is cut by index only, so results never depend on how many threads ran.
#pragma once

#include <cstdint>
#include <functional>

namespace nybble {

// Threads that parallel_for may use, the caller included. Default: the hardware's count. At least 1.
void set_num_threads(int count);
int num_threads();

// Calls body(begin, end) on chunks of at most `grain` indices that cover [0, count) exactly once, in any order, on several threads.
// Exceptions: the first one thrown is rethrown here once all chunks have ended or been skipped. Nested calls run serially.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t begin, int64_t end)>& body);

}  // namespace nybble
