// nybble bench, nybble tune: measured by the Python package, because "dense" and the dequantise path are torch's own multiply there. nybble
// plan: traced there, because what a step keeps is known to torch, transformers and PEFT. These commands find the package and hand over;
// docs/decisions has the reason.
#include <cstdlib>

#include "commands.h"
#include "core/posix.h"
#include "nybble/error.h"

namespace nybble::cli {

std::string python_program() {
  const char* named = std::getenv("NYBBLE_PYTHON");
  return named && *named ? named : "python3";
}

namespace {

// Runs `python -m module arguments...`; its exit code.
int hand_over(const std::string& module, const std::vector<std::string>& arguments) {
  const std::string python = python_program();
  const std::string probe = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('nybble') else 9)";
  const int found = posix::run_program({python, "-c", probe});
  if (found != 0) {
    fail(ErrorKind::kUnsupported, found == posix::kNoProgram ? "there is no program " : "no package nybble in ", python,
         "; this command is the Python package's, so install that there, or name an interpreter that has it in NYBBLE_PYTHON");
  }
  std::vector<std::string> command = {python, "-m", module};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return posix::run_program(command);
}

void add_front(CLI::App& app, Run& run, const std::string& name, const std::string& module, const std::string& text) {
  CLI::App* command = app.add_subcommand(name, text);
  command->set_help_flag();  // the options, --help among them, are the package's
  command->prefix_command();
  command->callback([command, module, &run] { run = [command, module] { return hand_over(module, command->remaining()); }; });
}

}  // namespace

void add_bench(CLI::App& app, Run& run) {
  add_front(app, run, "bench", "nybble.bench", "linear: times of every path of the multiply on this machine, beside dense torch");
}

void add_plan(CLI::App& app, Run& run) {
  add_front(app, run, "plan", "nybble.planning", "What a streamed LoRA run of a model would need, and what bounds it, before it runs");
}

void add_tune(CLI::App& app, Run& run) {
  add_front(app, run, "tune", "nybble.tune", "Measures the paths on this card and keeps a table of choices");
}

}  // namespace nybble::cli
