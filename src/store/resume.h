// An unfinished conversion on disk, and what it takes to go on with it.
//
//   DESTINATION.partial/resume.json    written first: source, options, command
//   DESTINATION.partial/store/         files appear in it whole; renamed to DESTINATION at the end
//
// A kill at any moment leaves one of: nothing; DESTINATION.partial; DESTINATION and a DESTINATION.partial that holds no store any more.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "nybble/convert.h"
#include "nybble/store.h"

namespace nybble {

std::filesystem::path partial_folder(const std::filesystem::path& destination);
std::filesystem::path store_in(const std::filesystem::path& partial);

// The shell command that goes on with a conversion.
std::string resume_command(const std::filesystem::path& source, const std::filesystem::path& destination, const QuantizeOptions& options);

// Compares with what resume.json says, or writes it. True when there is work of an earlier run to go on with. Throws DestinationError when
// that run had other options or its source has changed.
bool begin_or_resume(const std::filesystem::path& partial, const std::string& command, const Checkpoint& source,
                     const QuantizeOptions& options);

void remove_partial(const std::filesystem::path& partial);

}  // namespace nybble
