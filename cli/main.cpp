// The `nybble` command.
#include <cstdio>

int main() {
  std::puts("nybble 0.1.0");
  return 0;
}
