// The strip kernels for bfloat16 activations.
#include "linear/strip_launch.cuh"

template void nybble::small_m::strip::launch<__nv_bfloat16>(const LinearPlan&, const LinearProblem&, const LinearArgs&, bool, CUstream_st*);
