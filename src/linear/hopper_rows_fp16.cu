// The Hopper kernel for few token tiles, float16 activations.
#include "linear/hopper_rows_launch.cuh"

template void nybble::hopper::launch_rows<nybble::Direction::kForward, __half>(const Launch&);
template void nybble::hopper::launch_rows<nybble::Direction::kGradInput, __half>(const Launch&);
