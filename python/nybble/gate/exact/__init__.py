"""The exact gate: streamed against resident over shapes, adapters, windows, lengths and activation policies.

Every pair of values of two factors occurs in some cell. Both sides take nybble's kernels; forward and every gradient
must be equal to the bit in each repeat. Where copies are really late, the same streaming without its repair must be
wrong in exactly the layers that were refilled, and must raise where owners are checked.
"""

from nybble.gate.exact.command import SABOTAGES, add_arguments, run

__all__ = ["SABOTAGES", "add_arguments", "run"]
