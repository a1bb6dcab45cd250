// The subcommands. Each adds its options to the application and sets `run`, which returns an exit code, when it is the chosen one.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace nybble::cli {

using Run = std::function<int()>;

std::string python_program();  // $NYBBLE_PYTHON, else python3: the interpreter that bench, tune and doctor ask

void add_quantize(CLI::App& app, Run& run);
void add_inspect(CLI::App& app, Run& run);
void add_verify(CLI::App& app, Run& run);
void add_doctor(CLI::App& app, Run& run);
void add_bench(CLI::App& app, Run& run);
void add_tune(CLI::App& app, Run& run);
void add_plan(CLI::App& app, Run& run);

}  // namespace nybble::cli
