// Numbers as people read them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace nybble::cli {

inline std::string human_bytes(int64_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 4) value /= 1024, unit++;
  char text[40];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.2f %s", value, units[unit]);
  return text;
}

inline std::string human_seconds(double seconds) {
  char text[40];
  const auto whole = static_cast<int64_t>(seconds + 0.5);
  if (whole < 60) {
    std::snprintf(text, sizeof(text), "%llds", static_cast<long long>(whole));
  } else {
    std::snprintf(text, sizeof(text), "%lldm%02llds", static_cast<long long>(whole / 60), static_cast<long long>(whole % 60));
  }
  return text;
}

}  // namespace nybble::cli
