// Opens a checkpoint's files and joins their tensors into one table of names.
#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <set>

#include "core/posix.h"
#include "nybble/store.h"
#include "store/names.h"

namespace nybble {
namespace {

namespace fs = std::filesystem;
constexpr int64_t kMaxIndexBytes = 256 << 20;
constexpr const char* kFetchAgain = "fetch the checkpoint again";

struct Index {
  std::map<std::string, std::string> weight_map;  // tensor -> file name
  std::set<std::string> file_names;
};

// A shard's name may not lead out of the checkpoint's folder.
bool is_plain_name(const std::string& file_name) {
  return !file_name.empty() && file_name != "." && file_name != ".." && fs::path(file_name).filename() == file_name;
}

Index read_index(const fs::path& path, Faults& faults) {
  Index index;
  const auto json = nlohmann::json::parse(posix::read_file(path, kMaxIndexBytes), nullptr, false);
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) {
    faults.push_back({path.string(), "no object \"weight_map\"", "{\"weight_map\": {tensor: file, ...}}", kFetchAgain});
    return index;
  }
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    if (!file.is_string() || !is_plain_name(file.get<std::string>())) {
      faults.push_back({path.string(), tensor + ": " + file.dump().substr(0, 100), "the name of a file in the same folder", kFetchAgain});
      continue;
    }
    index.weight_map[tensor] = file.get<std::string>();
    index.file_names.insert(file.get<std::string>());
  }
  return index;
}

// The files that make up a checkpoint, and the index where there is one.
std::vector<fs::path> find_files(const fs::path& path, std::optional<Index>& index, Faults& faults) {
  if (!fs::exists(path)) fail(ErrorKind::kIo, path.string(), " does not exist; expected a checkpoint folder or a .safetensors file");
  if (!fs::is_directory(path)) return {path};
  const fs::path index_path = path / kIndexFileName;
  if (fs::exists(index_path)) {
    index = read_index(index_path, faults);
    std::vector<fs::path> files;
    for (const auto& name : index->file_names) files.push_back(path / name);
    return files;
  }
  if (fs::exists(path / kSingleFileName)) return {path / kSingleFileName};
  fail(ErrorKind::kFormat, path.string(), " has neither ", kIndexFileName, " nor ", kSingleFileName,
       "; expected a Hugging Face checkpoint in safetensors (convert .bin files with save_pretrained(safe_serialization=True))");
}

void check_index(const fs::path& folder, const Index& index, const Checkpoint& checkpoint, Faults& faults) {
  const std::string subject = (folder / kIndexFileName).string();
  std::set<std::string> opened;
  for (const auto& file : checkpoint.files()) opened.insert(file.path().filename().string());
  for (const auto& [tensor, file_name] : index.weight_map) {
    if (!opened.contains(file_name)) continue;  // noted when it failed to open
    const TensorView* found = checkpoint.find(tensor);
    if (found == nullptr || checkpoint.file_of(*found).path().filename() != file_name) {
      faults.push_back(
          {subject, tensor + " is said to be in " + file_name + ", which does not hold it", "an entry that is true", kFetchAgain});
    }
  }
  for (const TensorView* tensor : checkpoint.tensors()) {
    if (!index.weight_map.contains(tensor->name)) {
      faults.push_back({subject, "no entry for " + tensor->name, "an entry for every tensor of the shards", kFetchAgain});
    }
  }
}

}  // namespace

std::string to_string(const Fault& fault) {
  return fault.subject + ": found " + fault.found + ", expected " + fault.expected + (fault.remedy.empty() ? "" : "; " + fault.remedy);
}

void throw_if_any(const Faults& faults) {
  if (faults.empty()) return;
  if (faults.size() == 1) fail(ErrorKind::kFormat, to_string(faults[0]));
  fail(ErrorKind::kFormat, to_string(faults[0]), " (and ", faults.size() - 1, " more; `nybble verify` lists them all)");
}

Checkpoint::Checkpoint(const fs::path& path) {
  Faults faults;
  *this = Checkpoint(path, faults);
  throw_if_any(faults);
}

Checkpoint::Checkpoint(const fs::path& path, Faults& faults) : folder_(fs::is_directory(path) ? path : path.parent_path()) {
  std::optional<Index> index;
  for (const auto& file : find_files(path, index, faults)) {
    if (!fs::exists(file)) {
      faults.push_back({file.string(), "no such file", "the shard that the index names", kFetchAgain});
      continue;
    }
    try {
      files_.emplace_back(file);
    } catch (const Error& error) {
      faults.push_back({file.string(), error.what(), "a valid safetensors file", kFetchAgain});
    }
  }
  for (size_t i = 0; i < files_.size(); i++) {
    for (const auto& tensor : files_[i].tensors()) {
      const auto [at, added] = by_name_.emplace(tensor.name, std::pair(&tensor, i));
      if (!added) {
        faults.push_back({files_[i].path().string(),
                          tensor.name + ", which " + files_[at->second.second].path().filename().string() + " has too",
                          "each name in one shard", kFetchAgain});
      }
    }
    for (const auto& [other, stored] : files_[i].metadata()) aliases_.emplace(other, stored);
  }
  for (const auto& [name, entry] : by_name_) tensors_.push_back(entry.first);
  std::sort(tensors_.begin(), tensors_.end(), [](const auto* a, const auto* b) { return natural_less(a->name, b->name); });
  std::erase_if(aliases_, [&](const auto& alias) { return by_name_.contains(alias.first) || !by_name_.contains(alias.second); });
  if (index) check_index(folder_, *index, *this, faults);
}

const TensorView* Checkpoint::find(std::string_view name) const {
  auto found = by_name_.find(name);
  if (found == by_name_.end()) {
    const auto alias = aliases_.find(name);
    if (alias == aliases_.end()) return nullptr;
    found = by_name_.find(alias->second);
  }
  return found->second.first;
}

const SafetensorsFile& Checkpoint::file_of(const TensorView& tensor) const { return files_[by_name_.find(tensor.name)->second.second]; }

}  // namespace nybble
