"""The aliasing gate.

A streamed layer's weight is bytes in a recycled slot. A 4-bit multiply that keeps that weight on `ctx`, out of sight
of `save_for_backward`, reads in its backward whatever the slot holds by then: the forward stays right, the loss looks
healthy, the gradients are wrong. The gate shows that nybble's op is right where such ops are wrong, and that they are
wrong in exactly the layers in which they must be (patterns.py), so that a green line means something.
"""

from nybble.gate.aliasing.command import add_arguments, run

__all__ = ["add_arguments", "run"]
