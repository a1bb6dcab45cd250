// The small-M kernel for bfloat16 activations.
#include "linear/small_m_launch.cuh"

template void nybble::small_m::launch_direction<__nv_bfloat16>(const Launch&);
