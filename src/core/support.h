// What a build can do on a machine, in words. Pure: facts in, a sentence out, empty where there is nothing to say. A refusal: the operation
// would fail. A note: it works, but not as on other machines.
#pragma once

#include <string>
#include <string_view>

namespace nybble {

constexpr int kOldestFusedSm = 80;  // the portable kernels: cp.async, mma of bf16

// An NVIDIA driver that takes CUDA up to driver_cuda (12080 for 12.8, 0: no driver) and a build with CUDA build_cuda.
std::string refusal_of_driver(int build_cuda, int driver_cuda);

// A GPU of compute capability sm (75 for 7.5) and a build with code for targets ("75 80 90a"; the last also as PTX).
std::string refusal_of_gpu(const std::string& name, int sm, std::string_view targets);
std::string note_on_gpu(const std::string& name, int sm);

std::string note_on_cpu(bool avx2);
bool cpu_has_avx2();  // true on other machines than x86-64

}  // namespace nybble
