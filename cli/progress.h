// A progress bar on stderr: redrawn in place on a terminal, a line every few seconds elsewhere.
#pragma once

#include <chrono>

#include "nybble/convert.h"

namespace nybble::cli {

class ProgressBar {
 public:
  explicit ProgressBar(bool quiet);
  void update(const QuantizeProgress& progress);
  void finish();  // leaves the last state on screen and goes to a new line
  double seconds() const;

 private:
  void draw(const QuantizeProgress& progress);

  using Clock = std::chrono::steady_clock;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point drawn_ = {};
  const bool quiet_;
  const bool terminal_;
  bool open_line_ = false;
};

}  // namespace nybble::cli
