// The launch of the kernel for few token tiles, a template over the activation type. Included by one file per type.
#pragma once

#include "linear/hopper_params.cuh"
#include "linear/hopper_rows.cuh"

namespace nybble::hopper {

template <Direction DIRECTION, typename T>
void launch_rows(const Launch& l) {
  const HopperTile tile = hopper_tile(l.plan.variant);
  if (tile == HopperTile::kRows256) return launch_kernel<multiply_rows<DIRECTION, T, Rows256>, T, Rows256>(l);
  if (tile == HopperTile::kRows192) return launch_kernel<multiply_rows<DIRECTION, T, Rows192>, T, Rows192>(l);
  if (tile == HopperTile::kRows160) return launch_kernel<multiply_rows<DIRECTION, T, Rows160>, T, Rows160>(l);
  if (tile == HopperTile::kRows96) return launch_kernel<multiply_rows<DIRECTION, T, Rows96>, T, Rows96>(l);
  if (tile == HopperTile::kRows128) return launch_kernel<multiply_rows<DIRECTION, T, Rows128>, T, Rows128>(l);
  return launch_kernel<multiply_rows<DIRECTION, T, Rows64>, T, Rows64>(l);
}

}  // namespace nybble::hopper
