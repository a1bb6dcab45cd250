"""What the gate judges: nybble's op, the dequant path, and an op that keeps a private copy of its weight."""

from __future__ import annotations

import dataclasses

import torch

from nybble.gate.aliasing import arms as streamed
from nybble.gate.aliasing.layers import Weight4Bit
from nybble.gate.checks import CheckArm
from nybble.gate.multiply import Weight, multiply
from nybble.gate.runner import Role

HELD, WORKSPACE, WINDOW, FORMULA = "held", "workspace", "window", "formula"


def fused(direction: str, operand: torch.Tensor, weight: Weight) -> torch.Tensor:
    return multiply(direction, operand, weight)


def dequant(direction: str, operand: torch.Tensor, weight: Weight) -> torch.Tensor:
    return multiply(direction, operand, weight, mode="dequant")


class PrivateCopy(torch.autograd.Function):
    """Right gradients from recycled slots at the price of the model: the forward copies the weight onto ctx."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: Weight4Bit) -> torch.Tensor:
        parts = ("packed", "absmax", "nested_absmax", "offset")
        ctx.weight = dataclasses.replace(weight, uid=None, **{name: getattr(weight, name).clone() for name in parts})
        return streamed.launch_forward(x, weight)

    @staticmethod
    def backward(ctx, grad_y: torch.Tensor):
        return streamed.launch_backward(grad_y, ctx.weight), None


def private_copy(x: torch.Tensor, weight: Weight4Bit) -> torch.Tensor:
    return PrivateCopy.apply(x, weight)


def multiply_arms() -> list[CheckArm]:
    """Of one multiply."""
    return [
        CheckArm("auto", Role.PRODUCT.value, fused),
        CheckArm("dequant", Role.CONTROL.value, dequant, must=frozenset({HELD})),
    ]


def model_arms() -> list[CheckArm]:
    """Of a step of a model under nybble.stream. act: whether its linears keep private copies."""
    return [
        CheckArm("streamed model", Role.PRODUCT.value, lambda: False),
        CheckArm("model of private copies", Role.CONTROL.value, lambda: True, must=frozenset({FORMULA})),
    ]


def step_arms() -> list[CheckArm]:
    """Of a step over recycled slots."""
    return [
        CheckArm("streamed step", Role.PRODUCT.value, streamed.product),
        CheckArm("private copies", Role.CONTROL.value, private_copy, must=frozenset({WINDOW})),
    ]
