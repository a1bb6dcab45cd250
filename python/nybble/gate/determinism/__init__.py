"""The determinism gate: the same bits every time, and where a row's bits do not depend on the rows beside it.

Every plan must give equal bits on every repeat, with other data in the memory that the allocator hands out. With
batch_invariant=True a row alone must have the bits that it has among any number of others; for the default plans the
gate prints where that holds and where not.
"""

from nybble.gate.determinism.command import SABOTAGES, add_arguments, run

__all__ = ["SABOTAGES", "add_arguments", "run"]
