"""The numerics gate: the fused multiply against dequantise + linear and against float64, on both sides of every
dispatch boundary.

One row is one (shape, M, seed) in one direction. The product's error against float64 may not exceed 1.05 times that of
torch's own multiply by the same dequantised weights, no element may be off by more than its rounding and the sums'
own, and the counter of the planned path must have moved by exactly one launch.
"""

from nybble.gate.numerics.command import SABOTAGES, add_arguments, run

__all__ = ["SABOTAGES", "add_arguments", "run"]
