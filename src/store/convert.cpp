// The conversion, file by file: plan, write what is missing, publish with one rename.
#include "nybble/convert.h"

#include <algorithm>
#include <array>

#include "core/posix.h"
#include "nybble/store.h"
#include "store/config.h"
#include "store/file_writer.h"
#include "store/names.h"
#include "store/resume.h"
#include "store/selection.h"

namespace nybble {
namespace {

namespace fs = std::filesystem;

void check_options(const QuantizeOptions& options) {
  if (!is_block_size(options.block_size)) {
    fail(ErrorKind::kValue, "block size ", options.block_size, ", expected 32, 64, 128, 256, 512, 1024, 2048 or 4096");
  }
}

bool is_taken(const fs::path& destination) {
  return fs::exists(fs::symlink_status(destination)) && !(fs::is_directory(destination) && fs::is_empty(destination));
}

[[noreturn]] void refuse(const fs::path& destination) {
  throw DestinationError(destination.string() +
                         " exists and is not empty, expected a new name; nothing was changed. Remove it or choose another destination");
}

// A file of an earlier run is of use when it is exactly what the plan says, but for the lengths of the JSON texts.
bool is_written(const fs::path& path, const FilePlan& plan) {
  if (!fs::exists(path)) return false;
  try {
    const SafetensorsFile file(path);
    std::vector<int64_t> lengths;
    for (const auto& weight : plan.weights) {
      const TensorView* state = file.find(state_key(weight));
      if (state == nullptr) return false;
      lengths.push_back(static_cast<int64_t>(state->bytes.size()));
    }
    const auto expected = header_tensors(plan, lengths);
    return std::equal(expected.begin(), expected.end(), file.tensors().begin(), file.tensors().end(), [&](const auto& a, const auto& b) {
      return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape && a.begin + plan.data_start == b.file_offset;
    });
  } catch (const Error&) {
    return false;  // damaged since it was written: it is written again
  }
}

class Conversion {
 public:
  Conversion(const fs::path& source, const fs::path& destination, const QuantizeOptions& options,
             const std::function<void(const QuantizeProgress&)>& progress)
      : source_path_(source), destination_(destination), partial_(partial_folder(destination)), options_(options), tell_(progress) {}

  QuantizeSummary run() {
    if (is_taken(destination_)) return finish_cleanup();
    const Checkpoint source(source_path_);
    const std::string config = read_source_config(source.folder());
    Faults faults;
    const auto prequantized = quantized_tensors(source, faults);
    throw_if_any(faults);
    const auto files = plan_files(source, prequantized, options_);
    count(files);
    if (summary_.quantized + summary_.copied_quantized == 0) {
      fail(ErrorKind::kValue, source_path_.string(), ": none of ", source.tensors().size(),
           " tensors is chosen, expected linear weights in numbered layers; ", "name modules with --include");
    }
    fs::create_directories(partial_);
    const auto lock = take_lock();
    const bool resumed = begin_or_resume(partial_, resume_command(source_path_, destination_, options_), source, options_);
    fs::create_directories(store_in(partial_));
    if (resumed) remove_temporaries();
    for (const auto& file : files) write_or_keep(file, source);
    write_companions(source, config, files);
    posix::sync_folder(store_in(partial_));
    if (is_taken(destination_)) refuse(destination_);
    posix::rename_durably(store_in(partial_), destination_);
    remove_partial(partial_);
    return summary_;
  }

 private:
  // An earlier run may have been killed between the rename and its last clean-up.
  QuantizeSummary finish_cleanup() {
    if (!fs::is_directory(partial_) || fs::exists(store_in(partial_))) refuse(destination_);
    const auto lock = take_lock();
    remove_partial(partial_);
    summary_.was_complete = true;
    return summary_;
  }

  posix::FolderLock take_lock() {
    auto lock = posix::FolderLock::try_lock(partial_);
    if (!lock || !lock->still_at(partial_)) {
      throw DestinationError("another nybble is writing " + partial_.string() + ", expected to be alone; wait for it to end");
    }
    return std::move(*lock);
  }

  void count(const std::vector<FilePlan>& files) {
    for (const auto& file : files) {
      progress_.total_bytes += file.source_bytes();
      summary_.dense += static_cast<int64_t>(file.dense.size());
      for (const auto& weight : file.weights) (weight.dense != nullptr ? summary_.quantized : summary_.copied_quantized)++;
    }
    summary_.source_bytes = progress_.total_bytes;
    summary_.files = static_cast<int64_t>(files.size());
  }

  void remove_temporaries() {
    std::vector<fs::path> left;
    for (const auto& entry : fs::directory_iterator(store_in(partial_))) {
      if (entry.path().extension() == posix::kTemporarySuffix) left.push_back(entry.path());
    }
    for (const auto& path : left) fs::remove(path);
  }

  void write_or_keep(const FilePlan& file, const Checkpoint& source) {
    const fs::path path = store_in(partial_) / file.file_name;
    progress_.layer = file.layer;
    if (is_written(path, file)) {
      summary_.kept_files++;
      progress_.kept_bytes += file.source_bytes();
      advance(file.source_bytes());
    } else {
      write_planned_file(path, file, source, [&](int64_t bytes) { advance(bytes); });
    }
    const SafetensorsFile written(path);
    for (const auto& tensor : written.tensors())
      summary_.store_bytes += is_padding(tensor.name) ? 0 : static_cast<int64_t>(tensor.bytes.size());
  }

  void advance(int64_t bytes) {
    progress_.done_bytes += bytes;
    if (tell_) tell_(progress_);
  }

  void write_companions(const Checkpoint& source, const std::string& config, const std::vector<FilePlan>& files) {
    for (const auto& path : companion_files(source.folder())) {
      posix::write_file(store_in(partial_) / path.filename(), posix::read_file(path, INT64_MAX));
    }
    posix::write_file(store_in(partial_) / kConfigFileName, store_config(config, files));
    posix::write_file(store_in(partial_) / kIndexFileName, store_index(files, summary_.store_bytes));
  }

  const fs::path source_path_;
  const fs::path destination_;
  const fs::path partial_;
  const QuantizeOptions& options_;
  const std::function<void(const QuantizeProgress&)>& tell_;
  QuantizeProgress progress_;
  QuantizeSummary summary_;
};

}  // namespace

QuantizeSummary quantize_checkpoint(const fs::path& source, const fs::path& destination, const QuantizeOptions& options,
                                    const std::function<void(const QuantizeProgress&)>& progress) {
  check_options(options);
  const fs::path to = destination.has_filename() ? destination : destination.parent_path();
  try {
    return Conversion(source, to.lexically_normal(), options, progress).run();
  } catch (const fs::filesystem_error& error) {
    fail(ErrorKind::kIo, error.what());
  }
}

}  // namespace nybble
