"""The memory gate: no dense W in a multiply, and a streamed step that holds a window of the model.

One multiply may hold its operands, its result and the workspace that its plan states. A step over recycled slots may
hold no more than the same step over private buffers does beside its weights; an op that keeps private copies of its
weights for the backward holds the model.
"""

from nybble.gate.memory.command import SABOTAGES, add_arguments, run

__all__ = ["SABOTAGES", "add_arguments", "run"]
