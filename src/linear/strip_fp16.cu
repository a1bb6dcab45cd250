// The strip kernels for float16 activations.
#include "linear/strip_launch.cuh"

template void nybble::small_m::strip::launch<__half>(const LinearPlan&, const LinearProblem&, const LinearArgs&, bool, CUstream_st*);
