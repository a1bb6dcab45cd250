"""What the gate judges: nybble's paths, torch's, and multiplies with one planted fault each."""

from __future__ import annotations

import copy
import dataclasses

import torch

from nybble.gate.checks import CheckArm
from nybble.gate.multiply import FORWARD, Weight, dense_multiply, multiply
from nybble.gate.runner import Role

ERROR, ELEMENT, LAUNCH, EQUAL = "error", "element", "launch", "equal to dequantise + linear"
PANEL, PANELS = 16, 32  # terms between two roundings of the control with bf16 sums, at least; roundings, at most


def product(direction: str, operand: torch.Tensor, weight: Weight) -> torch.Tensor:
    return multiply(direction, operand, weight)


def dequant(direction: str, operand: torch.Tensor, weight: Weight) -> torch.Tensor:
    return multiply(direction, operand, weight, mode="dequant")


def dense(direction: str, operand: torch.Tensor, weight: Weight) -> torch.Tensor:
    return dense_multiply(direction, operand, weight.dense())


def flipped(weight: Weight, operand: torch.Tensor, direction: str) -> Weight:
    """One nibble changed by half the code table, in the row or column that the first token feels most."""
    column = int(operand[0].abs().argmax())
    element = column if direction == FORWARD else column * weight.k
    packed = weight.packed.clone()
    packed.view(-1)[element // 2] ^= 0x80 if element % 2 == 0 else 0x08
    return dataclasses.replace(weight, packed=packed)


def flipped_nibble(direction: str, operand: torch.Tensor, weight: Weight) -> torch.Tensor:
    return multiply(direction, operand, flipped(weight, operand, direction))


def flipped_nibble_dequant(direction: str, operand: torch.Tensor, weight: Weight) -> torch.Tensor:
    return multiply(direction, operand, flipped(weight, operand, direction), mode="dequant")


def shifted_scales(direction: str, operand: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Every block takes the scale of the block before it."""
    state = copy.copy(weight.state)
    state.absmax = state.absmax.roll(1)
    return multiply(direction, operand, dataclasses.replace(weight, state=state))


def swapped_rows(direction: str, operand: torch.Tensor, weight: Weight) -> torch.Tensor:
    """W with its first two rows exchanged: columns of y, or of grad_y on the way in."""
    if direction == FORWARD:
        y = multiply(direction, operand, weight).clone()
        y[:, [0, 1]] = y[:, [1, 0]]
        return y
    swapped = operand.clone()
    swapped[:, [0, 1]] = operand[:, [1, 0]]
    return multiply(direction, swapped, weight)


def low_precision_sums(direction: str, operand: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Right weights, but the running sum is rounded to the dtype of the result after every panel of terms."""
    matrix = weight.dense() if direction == FORWARD else weight.dense().t()  # [columns, terms]
    total = torch.zeros(operand.shape[0], matrix.shape[0], dtype=operand.dtype, device=operand.device)
    panel = max(PANEL, matrix.shape[1] // PANELS)
    for first in range(0, matrix.shape[1], panel):
        term = operand[:, first : first + panel].float() @ matrix[:, first : first + panel].float().t()
        total = (total.float() + term).to(operand.dtype)
    return total


def default_arms() -> list[CheckArm]:
    """The checks that a control must fail are its prediction; a single wrong weight may hide in the norm of all."""
    element, error = frozenset({ELEMENT}), frozenset({ERROR})
    control = Role.CONTROL.value
    return [
        CheckArm("auto", Role.PRODUCT.value, product),
        CheckArm("dequant", Role.PRODUCT.value, dequant),
        CheckArm("torch on a dense weight", Role.NATIVE.value, dense),
        CheckArm("flipped nibble", control, flipped_nibble, must=element, may=error),
        CheckArm("scales off by a block", control, shifted_scales, must=element | error),
        CheckArm("swapped rows", control, swapped_rows, must=element | error),
        CheckArm("bf16 sums", control, low_precision_sums, must=element | error),
        CheckArm("dequant, flipped nibble", control, flipped_nibble_dequant, must=element | {EQUAL}, may=error),
        CheckArm("dense path taken silently", control, dequant, must=frozenset({LAUNCH})),
    ]
