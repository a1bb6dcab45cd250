"""The multiply: linear (a weight and its QuantState), nf4_linear (tensors), matmul_4bit (bitsandbytes' twin)."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from . import _ops, autograd
from .quant_state import WeightArgs, dtype_code, mode_code, quant_type_code, table, weight_args
from .quantize import dequantize_4bit


def _matrix_shape(weight: WeightArgs) -> tuple[int, int]:
    if len(weight.shape) != 2:
        raise ValueError(
            f"quant_state.shape is {list(weight.shape)}, expected two dimensions [out_features, in_features]"
        )
    return weight.shape


def multiply(x, tensors, bias, uid, spec, guard):
    """The multiply behind every front, eager or compiled, for callers that have its arguments at hand.

    tensors: packed, absmax, code, nested_absmax, nested_code, offset. spec: n, k, block size, quant type, state
    dtype, nested dtype, mode and batch_invariant, as the codes of quant_state.py. bias, uid (a tensor), guard (a
    callable): or None.
    """
    if torch.compiler.is_compiling():
        if guard is not None:
            raise TypeError(
                "a callable guard cannot be compiled, expected a uid tensor; or leave this call out of torch.compile"
            )
        return _ops.linear_4bit(x, *tensors, bias, uid, *spec)
    return autograd.forward(x, tensors, bias, uid, spec, guard)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    quant_state: Any,
    bias: torch.Tensor | None = None,
    *,
    mode: str = "auto",
    batch_invariant: bool = False,
) -> torch.Tensor:
    """y = x W^T + bias from a 4-bit weight, differentiable in x and bias. Equals bitsandbytes.matmul_4bit(x,
    weight.t(), quant_state, bias=bias).

    x: [..., in_features], bfloat16, float16 or float32, 1 dimension or more, any strides. weight: the packed bytes of
    [out_features, in_features], never transposed. quant_state: bitsandbytes' or nybble's. bias: [out_features], any
    float dtype; it is cast to x.dtype for this call only. Returns [..., out_features] in x.dtype.

    mode: "auto" takes the planned path; "fused" refuses to keep a dense weight; "dequant" gives exactly
    dequantize_4bit(...).to(x.dtype) followed by torch's own linear. batch_invariant: a row's bits do not depend on
    how many rows there are.

    Raises ValueError or TypeError for arguments that do not fit together, NotImplementedError for a path that this
    build or card does not have, torch.OutOfMemoryError, and StaleWeightError for a streamed weight whose slot holds
    something else.
    """
    args = weight_args(weight, quant_state)
    n, k = _matrix_shape(args)
    spec = (
        n,
        k,
        args.blocksize,
        args.quant_type,
        args.state_dtype,
        args.nested_dtype,
        mode_code(mode),
        batch_invariant,
    )
    return multiply(x, args.tensors, bias, None, spec, None)


def nf4_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    shape: tuple[int, int],
    *,
    code: torch.Tensor | None = None,
    blocksize: int = 64,
    quant_type: str = "nf4",
    nested_absmax: torch.Tensor | None = None,
    nested_code: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    state_dtype: torch.dtype | None = None,
    mode: str = "auto",
    batch_invariant: bool = False,
    guard: torch.Tensor | autograd.Guard | None = None,
) -> torch.Tensor:
    """y = x W^T + bias, the weight given as tensors. As linear(), without a state object.

    packed: the bytes of shape = (out_features, in_features). absmax: float32 [blocks], or uint8 [blocks] with
    nested_absmax (float32 [ceil(blocks / 256)]), nested_code (float32 [256]) and offset (one float32). code: float32
    [16], by default that of quant_type. state_dtype: what the dequant path rounds to first, by default x.dtype.

    guard: names the weight of a recycled buffer. A uid tensor (0-dim int64 on the CPU, from SlotPool): the library
    checks in C++ before every launch, forward and backward, that the slot holds this weight. A callable: called with
    `packed` before the forward launch and, in backward, with the unpacked `packed` before that launch; what it raises
    goes to the caller; it must not hold the weight itself.
    """
    n, k = shape
    if code is None:
        code = table(quant_type, packed.device)
    tensors = (packed, absmax, code, nested_absmax, nested_code, offset)
    uid, check = (guard, None) if guard is None or isinstance(guard, torch.Tensor) else (None, guard)
    if check is not None and not callable(check):
        raise TypeError(f"guard is a {type(guard).__name__}, expected a uid tensor, a callable taking packed, or None")
    state_code = dtype_code(state_dtype or x.dtype, "state_dtype" if state_dtype else "x.dtype")
    spec = (n, k, blocksize, quant_type_code(quant_type), state_code, 0, mode_code(mode), batch_invariant)
    return multiply(x, tensors, bias, uid, spec, check)


def matmul_4bit(
    A: torch.Tensor,
    B: torch.Tensor,
    quant_state: Any,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of bitsandbytes.matmul_4bit: A [..., K] times the 4-bit weight of quant_state.shape [N, K], plus bias.
    Returns [..., N].

    B: the packed weight or its .t() view. out: receives the result and is returned. As upstream, a weight that was
    quantised as [K, N] (K != N) still works, with a DeprecationWarning, by way of a dense weight.
    """
    args = weight_args(B, quant_state)
    n, k = _matrix_shape(args)
    if A.dim() > 0 and A.shape[-1] == n != k:
        warnings.warn(
            f"matmul_4bit: the weight was quantised as [K, N], shape {[n, k]}; quantise it again as [N, K]",
            DeprecationWarning,
            stacklevel=2,
        )
        dense = dequantize_4bit(B.reshape(-1, 1), quant_state).to(A.dtype)
        result = torch.nn.functional.linear(A, dense.t(), bias)
    else:
        result = linear(A, B, quant_state, bias)
    if out is None:
        return result
    out.copy_(result)
    return out
