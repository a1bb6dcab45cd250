// What this library is: for bug reports, records and `nybble doctor`.
#pragma once

namespace nybble {

const char* version();          // "0.1.0"
const char* build_info_json();  // version, compiler, build_type, cuda (null without), cuda_targets, built_for_torch

}  // namespace nybble
