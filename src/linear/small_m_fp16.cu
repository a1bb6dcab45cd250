// The small-M kernel for float16 activations.
#include "linear/small_m_launch.cuh"

template void nybble::small_m::launch_direction<__half>(const Launch&);
