"""What a stored 4-bit weight must be like: its JSON state, tables and scales. Refused in the words of `nybble verify`.

As the core's reader (src/store/quant_state.h, src/store/verify.cpp), which lists every fault where this one raises the
first; here the shape has two sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import torch

from ..quant_state import BLOCK_SIZES

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
NESTED_BLOCKSIZE = 256
_NESTED_FIELDS = ("nested_blocksize", "nested_dtype", "nested_offset")
ROUNDED = 1 / 128  # relative: more than rounding to bfloat16 does
_MAX_BYTES = 65536  # real states have under 300; a limit keeps hostile nesting harmless

Refuse = Callable[[str, str, str], NoReturn]  # of a tensor: what was found, what was expected


class StateFields(NamedTuple):
    shape: tuple[int, int]  # [out_features, in_features]
    blocksize: int
    dtype: torch.dtype
    nested_dtype: torch.dtype | None  # None: plain scales
    offset: float


def _is_size(value) -> bool:
    return type(value) is int and value > 0


def _is_float32(value) -> bool:
    """Whether it is a number that float32 holds. Python's JSON knows NaN, Infinity and integers of any length."""
    if type(value) not in (int, float):
        return False
    try:
        return bool(torch.isfinite(torch.tensor(float(value), dtype=torch.float32)))
    except OverflowError:
        return False


def read_state(text: bytes, kind: str, key: str, refuse: Refuse) -> StateFields:
    """The fields of a quant state's JSON. kind: the quant type that the tensor's name `key` ends with."""
    try:
        fields = json.loads(text.decode()) if len(text) <= _MAX_BYTES else None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        refuse(key, f"{len(text)} bytes that are not a JSON object", "the quant state as JSON")

    def field(name: str, is_right: Callable[[object], bool], expected: str):
        if name not in fields:
            refuse(key, f"{name}: the field is missing", expected)
        if not is_right(fields[name]):
            refuse(key, f"{name}: {json.dumps(fields[name])[:100]}", expected)
        return fields[name]

    def dtype(name: str) -> torch.dtype:
        allowed = " or ".join(f'"{name}"' for name in DTYPES)
        return DTYPES[field(name, lambda value: isinstance(value, str) and value in DTYPES, allowed)]

    def is_shape(value) -> bool:
        return isinstance(value, list) and len(value) == 2 and all(map(_is_size, value))

    field("quant_type", lambda value: value == kind, f'"{kind}", the type that the tensor\'s name ends with')
    nested_dtype, offset = None, 0.0
    if any(name in fields for name in _NESTED_FIELDS):
        field("nested_blocksize", lambda value: _is_size(value) and value == NESTED_BLOCKSIZE, str(NESTED_BLOCKSIZE))
        nested_dtype = dtype("nested_dtype")
        offset = float(field("nested_offset", _is_float32, "a finite number"))
    sizes = f"a power of two from {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}"
    return StateFields(
        shape=tuple(field("shape", is_shape, "[out_features, in_features]")),
        blocksize=field("blocksize", lambda value: _is_size(value) and value in BLOCK_SIZES, sizes),
        dtype=dtype("dtype"),
        nested_dtype=nested_dtype,
        offset=offset,
    )


def require_table(key: str, found: torch.Tensor, expected: torch.Tensor, what: str, refuse: Refuse) -> None:
    """found: the size of `expected`. The multiply uses its own tables. The stored code table only has to name the same
    codes, as one does that a loader rounded to 16 bits; scales are made from the nested one, so it must be the same.
    """
    allowed = torch.zeros_like(expected) if what == "nested" else expected.abs() * ROUNDED
    wrong = (~((found.float() - expected).abs() <= allowed)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        refuse(key, f"entry {at} = {found[at].item():.9g}", f"{expected[at].item():.9g}, as in every {what} table")


def _first_infinite(values: torch.Tensor) -> tuple[int, int]:
    """How many are NaN or Inf, and the first's index."""
    wrong = (~torch.isfinite(values)).nonzero()
    return len(wrong), int(wrong[0]) if len(wrong) else -1


def require_finite_scales(weight, fields: dict[str, torch.Tensor], refuse: Refuse) -> None:
    """weight: a StoredWeight. fields: what streams of it, typed, on the CPU. One pass over the float scales."""
    part = "nested_absmax" if weight.nested else "absmax"
    low, high = torch.aminmax(fields[part])  # NaN where there is one
    if not (torch.isfinite(low) and torch.isfinite(high)):
        count, first = _first_infinite(fields[part])
        found = f"{count} values that are NaN or Inf, the first at {first}"
        refuse(f"{weight.name}.weight.{part}", found, "finite scales")
    if not weight.nested:
        return
    offset = torch.tensor(weight.offset).to(weight.nested_dtype)
    bound = torch.maximum(-low, high).to(weight.nested_dtype) + offset.abs()  # codes are in [-1, 1]
    if torch.isfinite(bound):
        return
    values = weight.nested_code[fields["absmax"].long()]  # finite parts can overflow together
    nested = fields["nested_absmax"].repeat_interleave(NESTED_BLOCKSIZE)[: weight.blocks]
    count, first = _first_infinite((values * nested).to(weight.nested_dtype) + offset)
    if count:
        refuse(f"{weight.name}.weight", f"the scale of block {first} is NaN or Inf", "finite scales")
