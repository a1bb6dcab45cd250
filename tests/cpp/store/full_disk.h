// Makes the disk of this test full after a number of bytes.
#pragma once

#include <cstdint>

namespace nybble::full_disk {

void set_budget(int64_t bytes);
void lift();
int cuts();  // writes of which only a part fitted, so far

}  // namespace nybble::full_disk
