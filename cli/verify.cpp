// nybble verify PATH
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "exit_codes.h"
#include "nybble/convert.h"
#include "nybble/store.h"

namespace nybble::cli {
namespace {

void print_json(const std::string& path, const char* status, const std::string& note, const VerifyReport& report) {
  nlohmann::ordered_json faults = nlohmann::ordered_json::array();
  for (const auto& fault : report.faults) {
    faults.push_back({{"subject", fault.subject}, {"found", fault.found}, {"expected", fault.expected}, {"remedy", fault.remedy}});
  }
  nlohmann::ordered_json json = {{"path", path}, {"status", status}, {"tensors", report.tensors}, {"quantized", report.quantized}};
  if (!note.empty()) json["note"] = note;
  json["faults"] = faults;
  std::printf("%s\n", json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

int verify(const std::string& path, bool json) {
  if (const auto note = incomplete_note(path)) {
    if (json) {
      print_json(path, "incomplete", *note, {});
    } else {
      std::printf("%s: %s\n", path.c_str(), note->c_str());
    }
    return kIncomplete;
  }
  if (!std::filesystem::exists(path))
    fail(ErrorKind::kIo, path, " does not exist, expected a store; make one with `nybble quantize SRC ", path, "`");
  const VerifyReport report = verify_store(path);
  if (json) {
    print_json(path, report.faults.empty() ? "ok" : "faults", "", report);
  } else {
    for (const auto& fault : report.faults) std::printf("fault: %s\n", to_string(fault).c_str());
    std::printf("%s: %s, %lld tensors, %lld 4-bit weights, %zu faults\n", path.c_str(), report.faults.empty() ? "ok" : "NOT ok",
                static_cast<long long>(report.tensors), static_cast<long long>(report.quantized), report.faults.size());
  }
  return report.faults.empty() ? kOk : kFaults;
}

}  // namespace

void add_verify(CLI::App& app, Run& run) {
  auto path = std::make_shared<std::string>();
  auto json = std::make_shared<bool>(false);
  auto* command = app.add_subcommand("verify", "Check every shape, sidecar, field and scale of a 4-bit checkpoint; lists all faults");
  command->add_option("PATH", *path, "store folder, or a checkpoint that bitsandbytes wrote")->required();
  command->add_flag("--json", *json, "machine-readable");
  command->callback([path, json, &run] { run = [path, json] { return verify(*path, *json); }; });
}

}  // namespace nybble::cli
