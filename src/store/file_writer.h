// Writes one file of a store from its plan.
#pragma once

#include <filesystem>
#include <functional>

#include "store/layout.h"

namespace nybble {

// Quantises or copies every tensor of the plan into `path`, which appears whole or not at all. Memory: a piece of 16 Mi weights and the
// scales of one weight. progress(bytes) is told of source bytes as they are used up. Throws kValue for NaN or Inf in a weight, kIo.
void write_planned_file(const std::filesystem::path& path, const FilePlan& plan, const Checkpoint& source,
                        const std::function<void(int64_t bytes)>& progress);

}  // namespace nybble
