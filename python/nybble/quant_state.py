"""The state that belongs to a 4-bit weight: bitsandbytes' QuantState by duck typing, or ours with the same fields."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch

# Codes of include/nybble/format.h and linear.h.
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
QUANT_TYPE_CODES = {"nf4": 0, "fp4": 1}
MODE_CODES = {"auto": 0, "fused": 1, "dequant": 2}
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


class QuantState:
    """Scales and meta data of one quantised tensor, with bitsandbytes' names. Every field may be assigned.

    absmax: float32 [blocks], or uint8 [blocks] codes when nested. shape: of the dense tensor. code: float32 [16].
    dtype: of the dense tensor. blocksize: 32..4096. quant_type: "nf4" or "fp4". Nested scales: offset, a float32
    0-dim tensor, and state2, a QuantState with absmax float32 [ceil(blocks / 256)], code float32 [256], blocksize 256
    and dtype float32.
    """

    def __init__(
        self, absmax, shape=None, code=None, blocksize=None, quant_type=None, dtype=None, offset=None, state2=None
    ):
        self.absmax = absmax
        self.shape = shape
        self.code = code
        self.blocksize = blocksize
        self.quant_type = quant_type
        self.dtype = dtype
        self.offset = offset
        self.state2 = state2
        self.nested = state2 is not None

    def to(self, device) -> None:
        """Moves every tensor to a device, in place, as bitsandbytes' does."""
        self.code = self.code.to(device)
        self.absmax = self.absmax.to(device)
        if self.nested:
            self.offset = self.offset.to(device)
            self.state2.absmax = self.state2.absmax.to(device)
            self.state2.code = self.state2.code.to(device)

    def __repr__(self) -> str:
        kind = "nested" if self.nested else "plain"
        shape = None if self.shape is None else tuple(self.shape)
        return f"QuantState({self.quant_type}, {shape}, blocksize={self.blocksize}, {kind} scales, {self.dtype})"


class WeightArgs(NamedTuple):
    """A weight as the ops take it: the tensors and the ints, in schema order."""

    tensors: tuple  # packed, absmax, code, nested_absmax, nested_code, offset
    shape: tuple[int, ...]
    blocksize: int
    quant_type: int
    state_dtype: int
    nested_dtype: int


def table(quant_type: str, device: torch.device) -> torch.Tensor:
    """The 16 values of "nf4" or "fp4" on a device, float32 [16]. One tensor a device, shared: do not write to it."""
    return _table(quant_type, device)


def nested_table(device: torch.device) -> torch.Tensor:
    """bitsandbytes' 256-entry dynamic map on a device, float32 [256]. Shared: do not write to it."""
    return _table("nested", device)


# What torch.compiler.assume_constant_result does, without importing the compiler (5 s) with nybble.
table._dynamo_marked_constant = True
nested_table._dynamo_marked_constant = True


@functools.cache
def _table(name: str, device: torch.device) -> torch.Tensor:
    from ._library import lib

    which, size = {"nf4": (0, 16), "fp4": (1, 16), "nested": (2, 256)}[name]
    values = (ctypes.c_float * size)()
    lib.nybble_table(which, values)
    return torch.tensor(list(values), dtype=torch.float32, device=device)


def _lookup(codes: dict, key: Any, what: str) -> int:
    try:
        return codes[key]
    except (KeyError, TypeError):
        found = f"{key!r}" if not isinstance(key, torch.Tensor) else "a tensor"
        raise ValueError(f"{what} is {found}, expected one of {', '.join(map(str, codes))}") from None


def quant_type_code(quant_type: str) -> int:
    return _lookup(QUANT_TYPE_CODES, quant_type, "quant_type")


def mode_code(mode: str) -> int:
    return _lookup(MODE_CODES, mode, "mode")


def dtype_code(dtype: torch.dtype, what: str) -> int:
    return _lookup(DTYPE_CODES, dtype, what)


def weight_args(packed: torch.Tensor, state: Any) -> WeightArgs:
    """Reads a weight and its state (bitsandbytes' or ours). ValueError or TypeError names what is missing."""
    if state is None:
        raise ValueError(
            "the weight has no quant_state, expected one: quantise it first (Linear4bit does when it moves to a device)"
        )
    if getattr(state, "packing_format_for_cpu", False):
        raise ValueError(
            "the weight is in bitsandbytes' CPU inference layout, expected the usual one; load the model again and "
            "call .train() before its first forward"
        )
    try:
        absmax, shape, code, state2 = state.absmax, state.shape, state.code, state.state2
        blocksize, quant_type, dtype = state.blocksize, state.quant_type, state.dtype
    except AttributeError as error:
        raise TypeError(
            f"quant_state is a {type(state).__name__} without {error.name!r}, expected a QuantState"
        ) from None
    if shape is None:
        raise ValueError("quant_state.shape is None, expected the shape of the dense weight")
    codes = QUANT_TYPE_CODES.get(quant_type), DTYPE_CODES.get(dtype)
    if None in codes:
        codes = quant_type_code(quant_type), dtype_code(dtype, "quant_state.dtype")
    if code is None:
        code = table(quant_type, absmax.device)
    if state2 is None:
        return WeightArgs((packed, absmax, code, None, None, None), tuple(shape), blocksize, *codes, 0)
    if state2.blocksize != 256:
        raise ValueError(f"quant_state.state2.blocksize is {state2.blocksize}, expected 256")
    nested_dtype = DTYPE_CODES.get(state2.dtype, 0) if state2.dtype is not None else 0
    return WeightArgs(
        (packed, absmax, code, state2.absmax, state2.code, state.offset), tuple(shape), blocksize, *codes, nested_dtype
    )
