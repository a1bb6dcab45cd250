"""Eager autograd of the multiply: one lean Function per direction.

Contract: nothing of a weight is kept except by save_for_backward. ctx holds the ints of the call, the dtype of the
bias and the guard. Under checkpointing the backward therefore reads the tensors that the recomputation saved, never
those of the first forward, whose buffers may hold another layer by then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import _ops
from .devices import first_use
from .errors import translate

Guard = Callable[[torch.Tensor], None]


def _launch(op, *args):
    """Calls an op past its registered autograd, and past the __torch_function__ of a parameter's class
    (bitsandbytes' is in Python and calls the op once more). Raises what it raises as the exact Python type.
    """
    try:
        with torch._C._AutoDispatchBelowAutograd(), torch._C.DisableTorchFunctionSubclass():
            return op(*args)
    except RuntimeError as error:
        raise translate(error) from None


class LinearFunction(torch.autograd.Function):
    """y = x W^T + bias. Inputs: x, packed, absmax, code, nested_absmax, nested_code, offset, bias, uid, then spec
    (the ints) and guard.
    """

    @staticmethod
    def forward(ctx, x, packed, absmax, code, nested_absmax, nested_code, offset, bias, uid, spec, guard):
        if guard is not None:
            guard(packed)
        y = _launch(_ops.linear_4bit, x, packed, absmax, code, nested_absmax, nested_code, offset, bias, uid, *spec)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(packed, absmax, code, nested_absmax, nested_code, offset, uid)
        ctx.spec = spec
        ctx.guard = guard
        ctx.bias_dtype = bias.dtype if ctx.needs_input_grad[7] else None
        return y

    @staticmethod
    def backward(ctx, grad_y):
        grad_x = grad_b = None
        if ctx.needs_input_grad[0]:
            weight = (
                ctx.saved_tensors
            )  # before any launch: this is what runs a recomputation, and its wait for the copy
            grad_x = grad_input(grad_y, weight, ctx.spec, ctx.guard)
        if ctx.needs_input_grad[7]:
            grad_b = _ops.grad_bias(grad_y, ctx.bias_dtype)
        return grad_x, None, None, None, None, None, None, grad_b, None, None, None


class GradInputFunction(torch.autograd.Function):
    """grad_x = grad_y W, differentiable in grad_y: its backward is the forward multiply without bias."""

    @staticmethod
    def forward(ctx, grad_y, packed, absmax, code, nested_absmax, nested_code, offset, uid, spec, guard):
        weight = (packed, absmax, code, nested_absmax, nested_code, offset, uid)
        grad_x = launch_grad_input(grad_y, weight, spec, guard)
        ctx.save_for_backward(*weight)
        ctx.spec = spec
        ctx.guard = guard
        return grad_x

    @staticmethod
    def backward(ctx, grad_grad_x):
        *weight, uid = ctx.saved_tensors
        return (forward(grad_grad_x, weight, None, uid, ctx.spec, ctx.guard), *[None] * 9)


def grad_input(grad_y, weight, spec, guard):
    """grad_x for a backward pass; recorded when that pass is itself differentiated (create_graph=True)."""
    if torch.is_grad_enabled() and grad_y.requires_grad:
        return GradInputFunction.apply(grad_y, *weight, spec, guard)
    return launch_grad_input(grad_y, weight, spec, guard)


def launch_grad_input(grad_y, weight, spec, guard):
    if guard is not None:
        guard(weight[0])
    return _launch(_ops.linear_4bit_grad_input, grad_y, *weight, *spec)


def forward(x, weight, bias, uid, spec, guard):
    """The multiply in eager mode. weight: packed, absmax, code, nested_absmax, nested_code, offset."""
    first_use(x)
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return LinearFunction.apply(x, *weight, bias, uid, spec, guard)
    if guard is not None:
        guard(weight[0])
    return _launch(_ops.linear_4bit, x, *weight, bias, uid, *spec)
