// What a codec kernel's rate is compared with: device copies by a kernel, 16 bytes a thread and instruction. Host-only.
#pragma once

#include <cstdint>

#include "nybble/cuda.h"

namespace nybble {

struct CopyKernel {
  const char* name;
  bool streaming;  // loads and stores marked as used once (evict first)
  bool one_pass;   // a CTA per piece; otherwise the CTAs that fit on the card stride over the pieces
};

constexpr CopyKernel kCopyKernels[] = {
    {"copy kernel, strided", false, false},
    {"copy kernel, strided cs", true, false},
    {"copy kernel, one pass", false, true},
    {"copy kernel, one pass cs", true, true},
};

// bytes: a multiple of 16, below 16 GiB; from and to: 16-byte aligned, disjoint.
void copy_by_kernel(const CopyKernel& kernel, const void* from, void* to, int64_t bytes, CudaStream stream);

}  // namespace nybble
