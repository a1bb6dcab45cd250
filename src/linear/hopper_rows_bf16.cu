// The Hopper kernel for few token tiles, bfloat16 activations.
#include "linear/hopper_rows_launch.cuh"

template void nybble::hopper::launch_rows<nybble::Direction::kForward, __nv_bfloat16>(const Launch&);
template void nybble::hopper::launch_rows<nybble::Direction::kGradInput, __nv_bfloat16>(const Launch&);
