"""quantize_4bit and dequantize_4bit: twins of bitsandbytes' functions, with the bits of its CUDA backend on every
device.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _ops
from .devices import first_use
from .errors import translate
from .quant_state import BLOCK_SIZES, QuantState, dtype_code, nested_table, quant_type_code, table, weight_args


def quantize_4bit(
    A: torch.Tensor,
    absmax: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    blocksize: int | None = None,
    compress_statistics: bool = False,
    quant_type: str = "fp4",
    quant_storage: torch.dtype = torch.uint8,
    *,
    offset: torch.Tensor | float | None = None,
) -> tuple[torch.Tensor, QuantState]:
    """Quantises a tensor blockwise to 4 bits. Arguments and result as in bitsandbytes.functional.quantize_4bit.

    A: bfloat16, float16 or float32, any shape. blocksize: 64 by default, 32..4096. compress_statistics: quantise the
    scales too. quant_type: "nf4" or "fp4". quant_storage: the dtype under which the packed bytes are returned, [bytes
    / itemsize, 1]. out, absmax: receive packed bytes and scales when given. offset: the stored offset of nested
    scales, to reproduce their bytes; by default the mean of absmax in a fixed order (float64), which does not depend
    on device or threads and may differ from bitsandbytes' in the last bit.

    Returns (packed, QuantState). Raises TypeError for a dtype that is not a float, ValueError for the rest.
    """
    blocksize = 64 if blocksize is None else blocksize
    type_code = quant_type_code(quant_type)
    if blocksize not in BLOCK_SIZES:
        raise ValueError(f"blocksize is {blocksize}, expected one of {', '.join(map(str, BLOCK_SIZES))}")
    itemsize = quant_storage.itemsize
    packed_bytes = (A.numel() + 1) // 2
    if packed_bytes % itemsize:
        raise ValueError(
            f"{A.numel()} values pack into {packed_bytes} bytes, expected a multiple of {itemsize} for quant_storage "
            f"{quant_storage}; use torch.uint8"
        )
    first_use(A)
    try:
        packed, scales = _ops.quantize_4bit(A.detach(), blocksize, type_code)
        state = QuantState(scales, A.shape, table(quant_type, A.device), blocksize, quant_type, A.dtype)
        if compress_statistics:
            _nest(state, offset)
    except RuntimeError as error:
        raise translate(error) from None
    packed = packed.view(-1).view(quant_storage).view(-1, 1)
    if absmax is not None:
        state.absmax = absmax.copy_(state.absmax)
    return (packed if out is None else out.copy_(packed)), state


def _nest(state: QuantState, offset: torch.Tensor | float | None) -> None:
    """Replaces plain scales by nested ones."""
    scales = state.absmax
    if scales.numel() == 0:
        mean = torch.zeros((), device=scales.device)
    elif offset is None:
        mean = _ops.absmax_mean(scales)
    else:
        mean = torch.as_tensor(offset, dtype=torch.float32).to(scales.device).reshape(())
    nested_code = nested_table(scales.device)
    state.absmax, nested_absmax = _ops.quantize_scales(scales, mean, nested_code)
    state.offset = mean
    state.state2 = QuantState(nested_absmax, scales.shape, nested_code, 256, None, torch.float32)
    state.nested = True


def dequantize_4bit(
    A: torch.Tensor,
    quant_state: Any = None,
    absmax: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    blocksize: int | None = None,
    quant_type: str = "fp4",
) -> torch.Tensor:
    """The dense tensor of packed 4-bit values. Arguments and result as in bitsandbytes.functional.dequantize_4bit.

    A: packed bytes, any dtype and shape; as upstream, a transposed view [1, bytes] gives the transposed result.
    Without quant_state, absmax and out are needed and out gives shape and dtype. Returns quant_state.shape in
    quant_state.dtype.
    """
    if quant_state is None:
        if absmax is None or out is None:
            raise ValueError("quant_state is None, expected one, or both absmax and out")
        quant_state = QuantState(absmax, out.shape, None, 64 if blocksize is None else blocksize, quant_type, out.dtype)
    dense = dense_weight(A, quant_state)
    if out is not None:
        dense = out.copy_(dense)
    return dense.t() if A.dim() > 0 and A.shape[0] == 1 else dense


def dense_weight(packed: torch.Tensor, quant_state: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The dense weight in dtype (by default that of the state): fp32 table value times scale, rounded once."""
    args = weight_args(packed, quant_state)
    first_use(packed)
    out_dtype = args.state_dtype if dtype is None else dtype_code(dtype, "dtype")
    shape = args.shape or (1,)
    columns = shape[-1]
    rows = 1
    for size in shape[:-1]:
        rows *= size
    try:
        dense = _ops.dequantize_4bit(
            *args.tensors, None, rows, columns, args.blocksize, args.quant_type, args.nested_dtype, out_dtype
        )
    except RuntimeError as error:
        raise translate(error) from None
    return dense.view(args.shape)
