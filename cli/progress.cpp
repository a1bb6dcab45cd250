#include "progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "units.h"

namespace nybble::cli {
namespace {

constexpr int kWidth = 30;
constexpr std::chrono::milliseconds kTerminalPeriod{100};
constexpr std::chrono::milliseconds kLogPeriod{5000};

}  // namespace

ProgressBar::ProgressBar(bool quiet) : quiet_(quiet), terminal_(isatty(STDERR_FILENO) == 1) {}

double ProgressBar::seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

void ProgressBar::update(const QuantizeProgress& progress) {
  if (quiet_) return;
  const auto now = Clock::now();
  const bool last = progress.done_bytes == progress.total_bytes;
  if (!last && now - drawn_ < (terminal_ ? kTerminalPeriod : kLogPeriod)) return;
  drawn_ = now;
  draw(progress);
}

void ProgressBar::draw(const QuantizeProgress& progress) {
  const double done = static_cast<double>(progress.done_bytes), total = std::max(1.0, static_cast<double>(progress.total_bytes));
  const double rate = static_cast<double>(progress.done_bytes - progress.kept_bytes) / std::max(1e-3, seconds());
  const int filled = static_cast<int>(kWidth * done / total);
  std::string bar(static_cast<size_t>(filled), '#');
  bar.resize(kWidth, '.');
  const std::string eta = rate > 0 ? human_seconds((total - done) / rate) : "?";
  std::fprintf(stderr, "%s[%s] %3.0f%%  %s of %s  %s/s  ETA %s  %-24.24s%s", terminal_ ? "\r" : "", bar.c_str(), 100 * done / total,
               human_bytes(progress.done_bytes).c_str(), human_bytes(progress.total_bytes).c_str(),
               human_bytes(static_cast<int64_t>(rate)).c_str(), eta.c_str(), progress.layer.c_str(), terminal_ ? "" : "\n");
  std::fflush(stderr);
  open_line_ = terminal_;
}

void ProgressBar::finish() {
  if (open_line_) std::fputc('\n', stderr);
  open_line_ = false;
}

}  // namespace nybble::cli
