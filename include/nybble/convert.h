// From a Hugging Face checkpoint to an NF4 store. Deterministic: bytes depend on the source and the options, not on threads or
// interruptions.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "nybble/error.h"
#include "nybble/format.h"

namespace nybble {

struct QuantizeOptions {
  QuantType quant_type = QuantType::kNf4;
  int64_t block_size = 64;
  bool nested = true;
  // Shell patterns over module names ("*.mlp.up_proj"). include replaces the default choice: the 2-D weights of numbered layers that are
  // no embedding, norm, head or router. exclude takes away from either.
  std::vector<std::string> include;
  std::vector<std::string> exclude;
};

struct QuantizeProgress {
  int64_t done_bytes = 0;  // of the source, files kept from an interrupted run included
  int64_t total_bytes = 0;
  int64_t kept_bytes = 0;  // of done_bytes: from the interrupted run
  std::string layer;       // being written
};

struct QuantizeSummary {
  int64_t quantized = 0;         // weights quantised
  int64_t copied_quantized = 0;  // weights that were 4-bit already: their bytes are kept
  int64_t dense = 0;             // tensors copied as they are
  int64_t source_bytes = 0;
  int64_t store_bytes = 0;
  int64_t files = 0;
  int64_t kept_files = 0;     // written by an interrupted run
  bool was_complete = false;  // an earlier run ended just before its last clean-up: nothing was left to do
};

// The destination exists, or another process is writing it.
class DestinationError : public Error {
 public:
  explicit DestinationError(const std::string& message) : Error(ErrorKind::kValue, message) {}
};

// Converts `source` (folder or .safetensors file) into the folder `destination`, which must not exist or be empty. Work goes on in
// DESTINATION.partial, file by file, and one rename makes the store appear whole. A second call with the same arguments resumes.
// Weights that bitsandbytes quantised before are laid out again, their bytes unchanged.
// Throws kFormat (source), kValue (options, non-finite weights), kUnsupported, kIo, DestinationError.
QuantizeSummary quantize_checkpoint(const std::filesystem::path& source, const std::filesystem::path& destination,
                                    const QuantizeOptions& options, const std::function<void(const QuantizeProgress&)>& progress = {});

// "incomplete, resume with `nybble quantize ...`" when an interrupted conversion is all there is at `destination`.
std::optional<std::string> incomplete_note(const std::filesystem::path& destination);

}  // namespace nybble
