"""The workspace that nybble's multiply wants on a card, for the trace. Without a card: none, which holds from a few
hundred tokens on; below, partial sums take up to 32 MiB.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from .._library import lib
from ..errors import check
from ..plan import _Call, _Weight
from ..quant_state import dtype_code, quant_type_code
from .stand_ins import Workspace

_ANY = 256  # an address that nothing reads


def _none(tokens: int, n: int, k: int, forward: bool) -> int:
    return 0


def multiply_workspace(device: torch.device | None, dtype: torch.dtype) -> Workspace:
    """workspace(tokens, n, k, forward): bytes, for NF4 with nested scales and block 64."""
    if device is None:
        return _none

    @functools.cache
    def workspace(tokens: int, n: int, k: int, forward: bool) -> int:
        weight = _Weight(_ANY, None, _ANY, _ANY, _ANY, _ANY, n, k, 64, quant_type_code("nf4"), 0)
        call = _Call(
            weight,
            tokens,
            k if forward else n,
            _ANY,
            None,
            device=device.index,
            direction=0 if forward else 1,
            dtype=dtype_code(dtype, "dtype"),
            state_dtype=dtype_code(dtype, "dtype"),
        )
        wanted = ctypes.c_int64()
        check(lib.nybble_linear_workspace(ctypes.byref(call), ctypes.byref(wanted)))
        return wanted.value

    return workspace
