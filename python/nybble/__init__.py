"""Nybble: a fused NF4 multiply and layer streaming for training LoRA adapters on a frozen 4-bit base."""

from __future__ import annotations

from ._library import build_info
from .counters import path_counters, reset_path_counters
from .errors import StaleWeightError, UnsupportedError
from .linear import linear, matmul_4bit, nf4_linear
from .quant_state import QuantState
from .quantize import dequantize_4bit, quantize_4bit

__version__ = build_info()["version"]

__all__ = [
    "QuantState",
    "StaleWeightError",
    "UnsupportedError",
    "build_info",
    "dequantize_4bit",
    "linear",
    "matmul_4bit",
    "nf4_linear",
    "path_counters",
    "quantize_4bit",
    "reset_path_counters",
]
