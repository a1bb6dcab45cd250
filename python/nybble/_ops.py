"""The torch ops of the native library, with what only Python can give them: fake kernels, compiled autograd, autocast.

Schemas: binding/ops.cpp. Eager code takes the lean autograd.Function of autograd.py; registered autograd serves
torch.compile and direct callers of torch.ops.nybble.
"""

from __future__ import annotations

import torch

from . import _library  # noqa: F401  loads the ops

linear_4bit = torch.ops.nybble.linear_4bit.default
linear_4bit_grad_input = torch.ops.nybble.linear_4bit_grad_input.default
dequantize_4bit = torch.ops.nybble.dequantize_4bit.default
quantize_4bit = torch.ops.nybble.quantize_4bit.default
quantize_scales = torch.ops.nybble.quantize_scales.default
absmax_mean = torch.ops.nybble.absmax_mean.default

_CODE_TO_DTYPE = (torch.float32, torch.float16, torch.bfloat16)
_SPEC = 8  # n, k, block_size, quant_type, state_dtype, nested_dtype, mode, batch_invariant


@torch.library.register_fake("nybble::linear_4bit")
def _(x, packed, absmax, code, nested_absmax, nested_code, offset, bias, uid, n, k, *spec):
    torch._check(x.shape[-1] == k, lambda: f"x has shape {list(x.shape)}, expected its last dimension to be {k}")
    return x.new_empty((*x.shape[:-1], n))


@torch.library.register_fake("nybble::linear_4bit_grad_input")
def _(grad_y, packed, absmax, code, nested_absmax, nested_code, offset, uid, n, k, *spec):
    torch._check(
        grad_y.shape[-1] == n, lambda: f"grad_y has shape {list(grad_y.shape)}, expected its last dimension to be {n}"
    )
    return grad_y.new_empty((*grad_y.shape[:-1], k))


@torch.library.register_fake("nybble::dequantize_4bit")
def _(
    packed, absmax, code, nested_absmax, nested_code, offset, uid, n, k, block_size, quant_type, nested_dtype, out_dtype
):
    return packed.new_empty((n, k), dtype=_CODE_TO_DTYPE[out_dtype])


@torch.library.register_fake("nybble::quantize_4bit")
def _(x, block_size, quant_type):
    count = x.numel()
    packed = x.new_empty(((count + 1) // 2, 1), dtype=torch.uint8)
    return packed, x.new_empty((-(-count // block_size),), dtype=torch.float32)


@torch.library.register_fake("nybble::quantize_scales")
def _(absmax, offset, nested_code):
    blocks = absmax.numel()
    return absmax.new_empty((blocks,), dtype=torch.uint8), absmax.new_empty((-(-blocks // 256),))


@torch.library.register_fake("nybble::absmax_mean")
def _(absmax):
    return absmax.new_empty(())


def grad_bias(grad_y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum of grad_y over all rows, [n] in the bias's dtype; sums run in fp32, as in F.linear's backward."""
    return grad_y.reshape(-1, grad_y.shape[-1]).sum(0, dtype=dtype)


def _save_linear(ctx, inputs, output):
    _, packed, absmax, code, nested_absmax, nested_code, offset, bias, uid, *spec = inputs
    if ctx.needs_input_grad[0]:
        ctx.save_for_backward(packed, absmax, code, nested_absmax, nested_code, offset, uid)
    ctx.spec = spec
    ctx.bias_dtype = bias.dtype if bias is not None else None


def _backward_linear(ctx, grad_y):
    grad_x = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_x = linear_4bit_grad_input(grad_y, *ctx.saved_tensors, *ctx.spec)
    if ctx.needs_input_grad[7]:
        grad_b = grad_bias(grad_y, ctx.bias_dtype)
    return (grad_x, *[None] * 6, grad_b, *[None] * (1 + _SPEC))


def _save_grad_input(ctx, inputs, output):
    _, *weight = inputs[:8]
    if ctx.needs_input_grad[0]:
        ctx.save_for_backward(*weight)
    ctx.spec = inputs[8:]


def _backward_grad_input(ctx, grad_grad_x):
    grad_y = None
    if ctx.needs_input_grad[0]:
        *weight, uid = ctx.saved_tensors
        grad_y = linear_4bit(grad_grad_x, *weight, None, uid, *ctx.spec)
    return (grad_y, *[None] * (7 + _SPEC))


torch.library.register_autograd("nybble::linear_4bit", _backward_linear, setup_context=_save_linear)
torch.library.register_autograd("nybble::linear_4bit_grad_input", _backward_grad_input, setup_context=_save_grad_input)


_library_impl = torch.library.Library("nybble", "FRAGMENT")
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


def _without_autocast(op):
    """Under autocast an op of ours computes in the dtype of its input; the dense matmul of the dequant path must
    not be recast either.
    """

    def kernel(*args):
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return op(*args)

    return kernel


for _op in (linear_4bit, linear_4bit_grad_input):
    for _key in ("AutocastCPU", "AutocastCUDA"):
        _library_impl.impl(_op._schema.name.split("::")[1], _without_autocast(_op), _key)
