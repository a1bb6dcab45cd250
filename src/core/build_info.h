// What this library is: for bug reports, records and `nybble doctor`.
#pragma once

namespace nybble {

const char* version();          // "0.1.0"
const char* cuda_targets();     // "80 90a"; empty in a build without CUDA
const char* build_info_json();  // version, compiler, build_type, flags, cuda (null without), cuda_targets, built_for_torch

}  // namespace nybble
