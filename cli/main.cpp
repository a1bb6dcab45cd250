// The `nybble` command.
#include <cstdio>
#include <exception>

#include "commands.h"
#include "exit_codes.h"
#include "nybble/convert.h"
#include "nybble/error.h"

namespace nybble::cli {
namespace {

int exit_code_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kIo:
    case ErrorKind::kOutOfMemory:
      return kSystem;
    case ErrorKind::kUnsupported:
    case ErrorKind::kCuda:
      return kUnsupported;
    default:
      return kBadInput;
  }
}

int report(const char* message, int code) {
  std::fflush(stdout);
  std::fprintf(stderr, "nybble: %s\n", message);
  return code;
}

int run_command(int argc, char** argv) {
  CLI::App app("Nybble: 4-bit (NF4) weights for training LoRA adapters. Exit codes: docs/command.md", "nybble");
  app.set_version_flag("--version", "nybble " NYBBLE_VERSION);
  app.require_subcommand(1);
  Run run;
  add_quantize(app, run);
  add_inspect(app, run);
  add_verify(app, run);
  add_doctor(app, run);
  add_bench(app, run);
  add_tune(app, run);
  add_plan(app, run);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kOk : kUsage;
  }
  try {
    return run();
  } catch (const DestinationError& error) {
    return report(error.what(), kDestination);
  } catch (const Error& error) {
    return report(error.what(), exit_code_of(error.kind()));
  } catch (const std::bad_alloc&) {
    return report("out of memory; close other programs, or use --threads 1", kSystem);
  } catch (const std::exception& error) {
    return report(error.what(), kInternal);
  }
}

}  // namespace
}  // namespace nybble::cli

int main(int argc, char** argv) { return nybble::cli::run_command(argc, argv); }
