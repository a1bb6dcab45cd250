"""Which code would multiply, and why: the C++ plan in words. Nothing here decides."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ._library import lib
from .counters import DIRECTIONS
from .errors import check
from .quant_state import WeightArgs, dtype_code, weight_args

_TEXT_BYTES = 1024


class _Weight(ctypes.Structure):
    """nybble_weight of c_api.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("packed", "absmax", "codes", "nested_absmax", "nested_code", "offset")],
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        *[(name, ctypes.c_int32) for name in ("block_size", "quant_type", "nested_dtype")],
    ]


class _Call(ctypes.Structure):
    """nybble_linear_call of c_api.h."""

    _fields_ = [
        ("weight", _Weight),
        ("m", ctypes.c_int64),
        ("in_row_stride", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in ("in", "bias", "out", "workspace", "stream")],
        *[
            (name, ctypes.c_int32)
            for name in ("device", "direction", "dtype", "state_dtype", "mode", "batch_invariant")
        ],
    ]


def _weight(args: WeightArgs) -> _Weight:
    packed, absmax, _, nested_absmax, nested_code, offset = args.tensors
    n, k = args.shape
    nested = nested_absmax is not None
    return _Weight(
        packed.data_ptr(),
        None if nested else absmax.data_ptr(),
        absmax.data_ptr() if nested else None,
        nested_absmax.data_ptr() if nested else None,
        nested_code.data_ptr() if nested else None,
        offset.data_ptr() if nested else None,
        n,
        k,
        args.blocksize,
        args.quant_type,
        args.nested_dtype,
    )


def _call_of(x, weight, quant_state, bias, direction, batch_invariant) -> _Call:
    if direction not in DIRECTIONS:
        raise ValueError(f"direction is {direction!r}, expected one of {', '.join(DIRECTIONS)}")
    args = weight_args(weight, quant_state)
    if len(args.shape) != 2:
        raise ValueError(
            f"quant_state.shape is {list(args.shape)}, expected two dimensions [out_features, in_features]"
        )
    forward = direction == "forward"
    columns = args.shape[1] if forward else args.shape[0]
    if x.dim() == 0 or x.shape[-1] != columns:
        raise ValueError(f"x has shape {list(x.shape)}, expected its last dimension to be {columns} for {direction}")
    rows = x.reshape(-1, columns)
    return _Call(
        _weight(args),
        rows.shape[0],
        max(rows.stride(0), columns),
        rows.data_ptr(),
        bias.data_ptr() if bias is not None and forward else None,
        device=x.device.index or 0 if x.is_cuda else -1,
        direction=DIRECTIONS.index(direction),
        dtype=dtype_code(x.dtype, "x.dtype"),
        state_dtype=args.state_dtype,
        batch_invariant=batch_invariant,
    )


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    quant_state: Any,
    bias: torch.Tensor | None = None,
    *,
    direction: str = "forward",
    batch_invariant: bool = False,
) -> str | None:
    """None when a fused path takes this multiply, else the reason why it would dequantise, in words.

    Arguments as for linear(); for direction "grad_input", x stands for grad_y [..., out_features]. Nothing is launched.
    """
    call, fused = _call_of(x, weight, quant_state, bias, direction, batch_invariant), ctypes.c_int32()
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    check(lib.nybble_linear_plan(ctypes.byref(call), ctypes.byref(fused), text, ctypes.c_size_t(_TEXT_BYTES)))
    return None if fused.value else text.value.decode()


def explain(
    x: torch.Tensor,
    weight: torch.Tensor,
    quant_state: Any,
    bias: torch.Tensor | None = None,
    *,
    direction: str = "forward",
    batch_invariant: bool = False,
) -> str:
    """The plan that mode="auto" follows for this multiply, in words: path, tiles, workspace, measured or not, why."""
    call = _call_of(x, weight, quant_state, bias, direction, batch_invariant)
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    check(lib.nybble_linear_explain(ctypes.byref(call), text, ctypes.c_size_t(_TEXT_BYTES)))
    return text.value.decode()
