#include "store/resume.h"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>

#include "core/posix.h"
#include "nybble/error.h"

namespace nybble {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
constexpr const char* kResumeFileName = "resume.json";
constexpr int64_t kMaxResumeBytes = 16 << 20;
constexpr int kVersion = 1;

std::string quoted_for_shell(const std::string& text) {
  const auto plain = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || std::string_view("/._-+=:,@%").find(c) != std::string_view::npos;
  };
  if (!text.empty() && std::all_of(text.begin(), text.end(), plain)) return text;
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

// What must be the same for the files of an earlier run to be of use.
Json terms_of(const Checkpoint& source, const QuantizeOptions& options) {
  Json files = Json::array();
  for (const auto& file : source.files()) {
    const auto stamp = posix::stamp_of(file.path());
    files.push_back(
        {{"file", fs::absolute(file.path()).lexically_normal().string()}, {"bytes", stamp.bytes}, {"modified_ns", stamp.modified_ns}});
  }
  return {{"version", kVersion},
          {"source", files},
          {"options",
           {{"quant_type", name(options.quant_type)},
            {"block_size", options.block_size},
            {"nested", options.nested},
            {"include", options.include},
            {"exclude", options.exclude}}}};
}

std::optional<Json> read_resume(const fs::path& partial) {
  if (!fs::exists(partial / kResumeFileName)) return std::nullopt;
  Json json = Json::parse(posix::read_file(partial / kResumeFileName, kMaxResumeBytes), nullptr, false);
  if (!json.is_object() || !json.contains("terms") || !json.contains("command") || !json["command"].is_string()) return std::nullopt;
  return json;
}

int64_t files_in(const fs::path& store) {
  if (!fs::is_directory(store)) return 0;
  return std::count_if(fs::directory_iterator(store), fs::directory_iterator(),
                       [](const auto& entry) { return entry.path().extension() == ".safetensors"; });
}

}  // namespace

fs::path partial_folder(const fs::path& destination) { return destination.string() + ".partial"; }
fs::path store_in(const fs::path& partial) { return partial / "store"; }

std::string resume_command(const fs::path& source, const fs::path& destination, const QuantizeOptions& options) {
  std::string command = "nybble quantize " + quoted_for_shell(fs::absolute(source).lexically_normal().string()) + " " +
                        quoted_for_shell(fs::absolute(destination).lexically_normal().string());
  if (options.quant_type != QuantType::kNf4) command += std::string(" --quant-type ") + name(options.quant_type);
  if (options.block_size != 64) command += " --block-size " + std::to_string(options.block_size);
  if (!options.nested) command += " --no-nested";
  for (const auto& pattern : options.include) command += " --include " + quoted_for_shell(pattern);
  for (const auto& pattern : options.exclude) command += " --exclude " + quoted_for_shell(pattern);
  return command;
}

bool begin_or_resume(const fs::path& partial, const std::string& command, const Checkpoint& source, const QuantizeOptions& options) {
  const Json terms = terms_of(source, options);
  const auto earlier = read_resume(partial);
  if (earlier && (*earlier)["terms"] == terms) return fs::exists(store_in(partial));
  if (earlier && files_in(store_in(partial)) > 0) {
    const bool same_options = (*earlier)["terms"].value("options", Json()) == terms["options"];
    throw DestinationError(partial.string() + " holds an unfinished conversion " +
                           (same_options ? "of another source, or its source has changed since" : "with other options") +
                           "; finish it with `" + (*earlier)["command"].get<std::string>() + "`, or remove the folder to start again");
  }
  fs::remove_all(store_in(partial));
  posix::write_file(partial / kResumeFileName, Json{{"command", command}, {"terms", terms}}.dump(1) + "\n");
  return false;
}

void remove_partial(const fs::path& partial) {
  fs::remove_all(store_in(partial));
  fs::remove_all(partial);
}

std::optional<std::string> incomplete_note(const fs::path& given) {
  const fs::path destination = given.has_filename() ? given : given.parent_path();
  const bool is_partial = destination.extension() == ".partial" && fs::is_directory(destination);
  const fs::path partial = is_partial ? destination : partial_folder(destination);
  const bool taken = !is_partial && fs::exists(destination) && !(fs::is_directory(destination) && fs::is_empty(destination));
  if (taken || !fs::is_directory(partial)) return std::nullopt;
  const auto resume = read_resume(partial);
  std::string target = partial.string();
  target.resize(target.size() - std::string_view(".partial").size());
  const std::string command = resume ? (*resume)["command"].get<std::string>() : "nybble quantize SRC " + quoted_for_shell(target);
  return "incomplete (" + std::to_string(files_in(store_in(partial))) + " files written), resume with `" + command + "`";
}

}  // namespace nybble
