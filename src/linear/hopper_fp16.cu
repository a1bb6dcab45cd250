// The Hopper kernel for float16 activations.
#include "linear/hopper_launch.cuh"

template void nybble::hopper::launch_direction<__half>(const Launch&);
