// nybble quantize SRC DST
#include <cstdio>
#include <map>
#include <memory>

#include "commands.h"
#include "core/parallel.h"
#include "exit_codes.h"
#include "nybble/convert.h"
#include "progress.h"
#include "units.h"

namespace nybble::cli {
namespace {

struct Arguments {
  std::string source, destination;
  QuantizeOptions options;
  bool no_nested = false;
  bool quiet = false;
  int threads = 0;
};

void print_summary(const Arguments& arguments, const QuantizeSummary& summary, double seconds) {
  if (summary.was_complete) {
    std::printf("%s: complete already (an earlier run was stopped at its last step)\n", arguments.destination.c_str());
    return;
  }
  std::printf("%s: %lld weights quantised, %lld kept as they were in 4 bits, %lld tensors copied\n", arguments.destination.c_str(),
              static_cast<long long>(summary.quantized), static_cast<long long>(summary.copied_quantized),
              static_cast<long long>(summary.dense));
  std::printf("%s -> %s in %lld files (%lld from an interrupted run), %.1f s\n", human_bytes(summary.source_bytes).c_str(),
              human_bytes(summary.store_bytes).c_str(), static_cast<long long>(summary.files), static_cast<long long>(summary.kept_files),
              seconds);
}

int quantize(const Arguments& arguments) {
  if (arguments.threads > 0) set_num_threads(arguments.threads);
  QuantizeOptions options = arguments.options;
  options.nested = !arguments.no_nested;
  ProgressBar bar(arguments.quiet);
  try {
    const auto summary = quantize_checkpoint(arguments.source, arguments.destination, options,
                                             [&](const QuantizeProgress& progress) { bar.update(progress); });
    bar.finish();
    print_summary(arguments, summary, bar.seconds());
  } catch (const Error& error) {
    bar.finish();
    const auto note = incomplete_note(arguments.destination);
    if (note && error.kind() == ErrorKind::kIo) std::fprintf(stderr, "nybble: %s: %s\n", arguments.destination.c_str(), note->c_str());
    throw;
  }
  return kOk;
}

}  // namespace

void add_quantize(CLI::App& app, Run& run) {
  auto arguments = std::make_shared<Arguments>();
  auto* command = app.add_subcommand("quantize", "Convert a Hugging Face checkpoint (safetensors) to a 4-bit store; run again to resume");
  command->add_option("SRC", arguments->source, "checkpoint folder or .safetensors file")->required();
  command->add_option("DST", arguments->destination, "new folder; work goes on in DST.partial until the store is whole")->required();
  const std::map<std::string, QuantType> types = {{"nf4", QuantType::kNf4}, {"fp4", QuantType::kFp4}};
  command->add_option("--quant-type", arguments->options.quant_type, "nf4 (default) or fp4")->transform(CLI::CheckedTransformer(types));
  command->add_option("--block-size", arguments->options.block_size, "weights that share a scale (default 64)")
      ->check(CLI::IsMember({32, 64, 128, 256, 512, 1024, 2048, 4096}));
  command->add_flag("--no-nested", arguments->no_nested, "keep scales in fp32 instead of 8 bits");
  command
      ->add_option("--include", arguments->options.include,
                   "quantise the modules that match, e.g. '*.mlp.*', instead of the default choice")
      ->allow_extra_args(false);
  command->add_option("--exclude", arguments->options.exclude, "leave the modules that match as they are")->allow_extra_args(false);
  command->add_option("--threads", arguments->threads, "default: all")->check(CLI::Range(1, 1024));
  command->add_flag("--quiet", arguments->quiet, "no progress bar");
  command->footer("Default choice: 2-D weights of numbered layers, without embeddings, norms, heads and routers.");
  command->callback([arguments, &run] { run = [arguments] { return quantize(*arguments); }; });
}

}  // namespace nybble::cli
