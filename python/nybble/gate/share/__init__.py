"""The share gate: what dequantisation costs of a training step on this card, and what the fused multiply saves of it.

Arms take turns on one resident model: dequantise + linear, fused, and an ablation that multiplies by the real dense
weight and so decodes nothing. A fused arm that saves more than the ablation differs in more than the dequantisation.
"""

from nybble.gate.share.command import SABOTAGES, add_arguments, run

__all__ = ["SABOTAGES", "add_arguments", "run"]
