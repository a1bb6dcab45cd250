"""Nybble: a fused NF4 multiply and layer streaming for training LoRA adapters on a frozen 4-bit base."""

from __future__ import annotations

from ._library import build_info
from .counters import path_counters, reset_path_counters
from .errors import StaleWeightError, UnsupportedError
from .linear import linear, matmul_4bit, nf4_linear
from .plan import explain, supports
from .quant_state import QuantState
from .quantize import dequantize_4bit, quantize_4bit
from .streaming.pool import SlotPool

__version__ = build_info()["version"]

__all__ = [
    "QuantState",
    "SlotPool",
    "StaleWeightError",
    "UnsupportedError",
    "build_info",
    "chunk_loss",
    "dequantize_4bit",
    "explain",
    "linear",
    "matmul_4bit",
    "memory_stats",
    "nf4_linear",
    "patch",
    "path_counters",
    "plan_training",
    "quantize_4bit",
    "reset_path_counters",
    "stream",
    "supports",
    "unpatch",
    "unstream",
    "whole_loss",
]


def __getattr__(name: str):
    # Whole models need transformers (streaming) and bitsandbytes, the rest of nybble does not.
    if name in ("memory_stats", "stream", "unstream"):
        from .streaming import model

        return getattr(model, name)
    if name in ("chunk_loss", "whole_loss"):
        from .streaming import loss

        return getattr(loss, name)
    if name == "plan_training":
        from .planning import plan_training

        return plan_training
    if name in ("patch", "unpatch"):
        from .patching import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
