#include "core/build_info.h"

#include "core/build_config.h"

namespace nybble {

const char* version() { return NYBBLE_VERSION; }
const char* cuda_targets() { return NYBBLE_CUDA_TARGETS; }
const char* build_info_json() { return NYBBLE_BUILD_INFO; }

}  // namespace nybble
