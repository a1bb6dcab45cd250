"""The speed gate: tokens per second and peak memory of training, resident and streamed, together.

Each arm must prove that it trains; the default multiply may not be slower than dequantise + linear.
"""

from nybble.gate.speed.command import SABOTAGES, add_arguments, run

__all__ = ["SABOTAGES", "add_arguments", "run"]
