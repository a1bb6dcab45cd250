// Tune tables as JSON, and the one that plans of this process follow.
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "nybble/error.h"
#include "nybble/tune.h"

namespace nybble {
namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

constexpr int kVersion = 1;
constexpr const char* kVersionKey = "nybble_tune";

constexpr const char* kDirections[] = {"forward", "grad_input"};

template <typename Enum, size_t COUNT, typename Name>
Enum named(const std::string& text, const Enum (&values)[COUNT], Name name, const char* what) {
  std::string expected;
  for (const Enum value : values) {
    if (text == name(value)) return value;
    expected += std::string(expected.empty() ? "" : ", ") + name(value);
  }
  fail(ErrorKind::kFormat, what, " \"", text, "\", expected one of ", expected);
}

Direction direction_named(const std::string& text) {
  constexpr Direction kAll[] = {Direction::kForward, Direction::kGradInput};
  return named(
      text, kAll, [](Direction d) { return kDirections[static_cast<int>(d)]; }, "direction");
}
DType dtype_named(const std::string& text) {
  constexpr DType kAll[] = {DType::kBFloat16, DType::kFloat16};
  return named(
      text, kAll, [](DType d) { return name(d); }, "dtype");
}
LinearPath path_named(const std::string& text) {
  constexpr LinearPath kAll[] = {LinearPath::kDequant, LinearPath::kRow, LinearPath::kPortable, LinearPath::kSmallM, LinearPath::kHopper};
  return named(
      text, kAll, [](LinearPath p) { return name(p); }, "path");
}

void require_keys(const Json& object, const std::set<std::string>& keys) {
  if (!object.is_object()) fail(ErrorKind::kFormat, object.type_name(), ", expected an object");
  for (const auto& [key, value] : object.items()) {
    if (!keys.contains(key)) fail(ErrorKind::kFormat, "key \"", key, "\" is not known");
  }
}

const Json& member(const Json& object, const char* key) {
  if (!object.contains(key)) fail(ErrorKind::kFormat, "no \"", key, "\"");
  return object[key];
}
std::string text_of(const Json& object, const char* key) {
  const Json& value = member(object, key);
  if (!value.is_string()) fail(ErrorKind::kFormat, "\"", key, "\" is a ", value.type_name(), ", expected a string");
  return value.get<std::string>();
}
int64_t integer_of(const Json& object, const char* key) {
  const Json& value = member(object, key);
  if (!value.is_number_integer()) fail(ErrorKind::kFormat, "\"", key, "\" is ", value.dump(), ", expected an integer");
  return value.get<int64_t>();
}

TuneEntry entry_of(const Json& from) {
  require_keys(from, {"device", "direction", "dtype", "n", "k", "m_min", "m_max", "path"});
  TuneEntry e;
  e.device = text_of(from, "device");
  e.direction = direction_named(text_of(from, "direction"));
  e.dtype = dtype_named(text_of(from, "dtype"));
  e.n = integer_of(from, "n");
  e.k = integer_of(from, "k");
  e.m_min = integer_of(from, "m_min");
  e.m_max = integer_of(from, "m_max");
  e.path = path_named(text_of(from, "path"));
  return e;
}

OrderedJson json_of(const TuneEntry& e) {
  return {{"device", e.device},
          {"direction", kDirections[static_cast<int>(e.direction)]},
          {"dtype", name(e.dtype)},
          {"n", e.n},
          {"k", e.k},
          {"m_min", e.m_min},
          {"m_max", e.m_max},
          {"path", name(e.path)}};
}

TuneTable read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  if (!file) fail(ErrorKind::kIo, "NYBBLE_TUNE names ", path, ", which cannot be read; unset it, or write the table with `nybble tune`");
  return tune_table_from_json(text.str(), path);
}

// Tables live for ever: a plan may still read the one before.
struct Active {
  std::mutex mutex;
  std::vector<std::unique_ptr<const TuneTable>> tables;
  std::atomic<const TuneTable*> table{nullptr};
  std::atomic<bool> decided{false};

  void set(const TuneTable& wanted) {
    tables.push_back(std::make_unique<const TuneTable>(wanted));
    table = wanted.entries().empty() ? nullptr : tables.back().get();
    decided = true;
  }
};
Active& active() {
  static Active instance;
  return instance;
}

}  // namespace

std::string to_json(const TuneTable& table) {
  std::string text = std::string("{\n \"") + kVersionKey + "\": " + std::to_string(kVersion) + ",\n \"entries\": [";
  const char* separator = "\n  ";
  for (const TuneEntry& e : table.entries()) {
    text += separator + json_of(e).dump();
    separator = ",\n  ";
  }
  return text + "\n ]\n}\n";
}

TuneTable tune_table_from_json(std::string_view text, const std::string& source) {
  std::string where = "the file";
  try {
    const Json json = Json::parse(text);
    require_keys(json, {kVersionKey, "entries", "measured"});
    if (integer_of(json, kVersionKey) != kVersion) {
      fail(ErrorKind::kFormat, "version ", member(json, kVersionKey).dump(), ", this build reads ", kVersion, "; tune again");
    }
    const Json& entries = member(json, "entries");
    if (!entries.is_array()) fail(ErrorKind::kFormat, "\"entries\" is a ", entries.type_name(), ", expected an array");
    TuneTable table;
    for (size_t i = 0; i < entries.size(); i++) {
      where = "entry " + std::to_string(i);
      table.add(entry_of(entries[i]));
    }
    return table;
  } catch (const Json::exception& error) {
    fail(ErrorKind::kFormat, "tune table ", source, ": not JSON: ", error.what());
  } catch (const Error& error) {
    fail(ErrorKind::kFormat, "tune table ", source, ", ", where, ": ", error.what());
  }
}

const TuneTable* active_tune_table() {
  Active& a = active();
  if (!a.decided) {
    const std::lock_guard lock(a.mutex);
    const char* path = std::getenv("NYBBLE_TUNE");
    if (!a.decided) a.set(path && *path ? read_file(path) : TuneTable{});
  }
  return a.table;
}

void set_active_tune_table(const TuneTable& table) {
  const std::lock_guard lock(active().mutex);
  active().set(table);
}

}  // namespace nybble
