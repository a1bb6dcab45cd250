"""Ops that look right and break one point of the contract each: what the checks must notice."""

from __future__ import annotations

import torch

from nybble import _ops
from nybble.quant_state import weight_args


def _spec(packed, state):
    args = weight_args(packed, state)
    return args.tensors, (*args.shape, args.blocksize, args.quant_type, args.state_dtype, args.nested_dtype, 0, False)


def _launch(x, tensors, bias, spec):
    with torch._C._AutoDispatchBelowAutograd():
        return _ops.linear_4bit(x, *tensors, bias, None, *spec)


def _launch_grad(grad_y, tensors, spec):
    with torch._C._AutoDispatchBelowAutograd():
        return _ops.linear_4bit_grad_input(grad_y, *tensors, None, *spec)


class _Base(torch.autograd.Function):
    """The right op, in the open: twins override one step each."""

    @staticmethod
    def save(ctx, tensors):
        ctx.save_for_backward(*tensors)

    @staticmethod
    def load(ctx):
        return ctx.saved_tensors

    @classmethod
    def run_forward(cls, ctx, x, bias, spec, tensors):
        y = _launch(x, tensors, bias, spec)
        cls.save(ctx, tensors)
        ctx.spec = spec
        return y

    @classmethod
    def run_backward(cls, ctx, grad_y):
        tensors = cls.load(ctx)
        grad_x = cls.grad_x(grad_y, tensors, ctx.spec)
        grad_b = cls.grad_bias(grad_y) if ctx.needs_input_grad[1] else None
        return (grad_x, grad_b, None, *[None] * 6)

    @staticmethod
    def grad_x(grad_y, tensors, spec):
        return _launch_grad(grad_y, tensors, spec)

    @staticmethod
    def grad_bias(grad_y):
        return grad_y.sum(0)


def _twin(**steps):
    """An op in which `steps` (save, load, grad_x, grad_bias, run_backward) replace those of _Base."""
    cls = type("Twin", (_Base,), {name: staticmethod(step) for name, step in steps.items()})
    cls.forward = staticmethod(lambda ctx, x, bias, spec, *tensors: cls.run_forward(ctx, x, bias, spec, tensors))
    backward = steps.get("run_backward") or (lambda ctx, grad_y: cls.run_backward(ctx, grad_y))
    cls.backward = staticmethod(backward)

    def op(x, packed, state, bias=None):
        tensors, spec = _spec(packed, state)
        return cls.apply(x, bias, spec, *tensors)

    return op


def _save_on_ctx(ctx, tensors):
    ctx.weight = tensors


def _save_scales_on_ctx(ctx, tensors):
    ctx.save_for_backward(tensors[0])
    ctx.scales = tensors[1:]


class _Box:
    def __init__(self, tensors):
        self.tensors = tensors


def _save_in_closure(ctx, tensors):
    ctx.save_for_backward(tensors[0])  # a decoy: what is read hides in a closure
    box = _Box(tensors)
    ctx.fetch = lambda: box.tensors


def _save_and_remember(ctx, tensors):
    ctx.save_for_backward(*tensors)
    _seen.clear()
    _seen.extend(tensors)


_seen: list = []  # outside the graph, where no walk looks


def _launch_first(ctx, grad_y):
    grad_x = _launch_grad(grad_y, tuple(_seen), ctx.spec)
    _ = ctx.saved_tensors
    return (grad_x, grad_y.sum(0) if ctx.needs_input_grad[1] else None, None, *[None] * 6)


def _flip_one_nibble(grad_y, tensors, spec):
    packed = tensors[0].clone()
    packed.view(-1)[5] ^= 0xF0
    return _launch_grad(grad_y, (packed, *tensors[1:]), spec)


class _WrongSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, grad_y, spec, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.spec = spec
        return _launch_grad(grad_y, tensors, spec)

    @staticmethod
    def backward(ctx, direction):
        return (2 * _launch(direction, ctx.saved_tensors, None, ctx.spec), *[None] * 7)


right = _twin()
weight_on_ctx = _twin(save=_save_on_ctx, load=lambda ctx: ctx.weight)
scales_on_ctx = _twin(save=_save_scales_on_ctx, load=lambda ctx: (*ctx.saved_tensors, *ctx.scales))
weight_in_closure = _twin(save=_save_in_closure, load=lambda ctx: ctx.fetch())
launches_first = _twin(save=_save_and_remember, run_backward=_launch_first)
flipped_nibble = _twin(grad_x=_flip_one_nibble)
short_bias_sum = _twin(grad_bias=lambda grad_y: grad_y[1:].sum(0))
wrong_second_derivative = _twin(
    grad_x=lambda grad_y, tensors, spec: _WrongSecondDerivative.apply(grad_y, spec, *tensors)
)
