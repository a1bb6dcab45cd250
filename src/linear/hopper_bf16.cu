// The Hopper kernel for bfloat16 activations.
#include "linear/hopper_launch.cuh"

template void nybble::hopper::launch_direction<__nv_bfloat16>(const Launch&);
