"""The equality gate: a streamed model's outputs and gradients against the resident model's, bit for bit.

Both sides take nybble's kernels, then both take `dequant`, so that streaming is measured and not the kernel. The same
streaming with the repair disabled (the weight on ctx) must be wrong in exactly the layers that were refilled, and must
raise where owners are checked.
"""

from nybble.gate.equality.command import SABOTAGES, add_arguments, run

__all__ = ["SABOTAGES", "add_arguments", "run"]
