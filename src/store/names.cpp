#include "store/names.h"

#include <algorithm>

namespace nybble {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

size_t digits_from(std::string_view text, size_t at) {
  size_t end = at;
  while (end < text.size() && is_digit(text[end])) end++;
  return end - at;
}

}  // namespace

bool natural_less(std::string_view a, std::string_view b) {
  size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    if (!is_digit(a[i]) || !is_digit(b[j])) {
      if (a[i] != b[j]) return static_cast<unsigned char>(a[i]) < static_cast<unsigned char>(b[j]);
      i++, j++;
      continue;
    }
    auto x = a.substr(i, digits_from(a, i));
    auto y = b.substr(j, digits_from(b, j));
    i += x.size(), j += y.size();
    x.remove_prefix(std::min(x.find_first_not_of('0'), x.size()));
    y.remove_prefix(std::min(y.find_first_not_of('0'), y.size()));
    if (x.size() != y.size()) return x.size() < y.size();
    if (x != y) return x < y;
  }
  if ((a.size() - i == 0) != (b.size() - j == 0)) return a.size() - i == 0;
  return a < b;  // differ in leading zeros only
}

std::string_view layer_of(std::string_view tensor_name) {
  for (size_t at = tensor_name.find('.'); at != std::string_view::npos; at = tensor_name.find('.', at + 1)) {
    const size_t digits = digits_from(tensor_name, at + 1);
    if (digits > 0 && at + 1 + digits < tensor_name.size() && tensor_name[at + 1 + digits] == '.')
      return tensor_name.substr(0, at + 1 + digits);
  }
  return {};
}

std::string_view module_of(std::string_view tensor_name) {
  constexpr std::string_view kEnding = ".weight";
  return tensor_name.ends_with(kEnding) ? tensor_name.substr(0, tensor_name.size() - kEnding.size()) : tensor_name;
}

bool glob_match(std::string_view pattern, std::string_view text) {
  size_t p = 0, t = 0, star = std::string_view::npos, retry = 0;
  while (t < text.size()) {
    if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t]) && pattern[p] != '*') {
      p++, t++;
    } else if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      retry = t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++retry;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') p++;
  return p == pattern.size();
}

}  // namespace nybble
