"""What the gate repeats: nybble's multiply, and two multiplies whose sums run in an order that they must not."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nybble.gate.checks import CheckArm
from nybble.gate.multiply import FORWARD, Weight, multiply
from nybble.gate.runner import Role

REPEATS, ALONE = "repeats", "rows alone"
PANEL = 16  # terms that are summed before the order begins to matter

Act = Callable[[str, torch.Tensor, Weight], torch.Tensor]


def by_plan(direction: str, operand: torch.Tensor, weight: Weight) -> torch.Tensor:
    return multiply(direction, operand, weight)


def invariant(direction: str, operand: torch.Tensor, weight: Weight) -> torch.Tensor:
    return multiply(direction, operand, weight, batch_invariant=True)


def arrival_order(direction: str, operand: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Partial sums are added to the result in a random order, as atomics add them in the order of arrival."""
    return in_panels(direction, operand, weight, lambda count: torch.randperm(count).tolist())


def order_by_rows(direction: str, operand: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Partial sums are added from another start for another number of rows: repeatable, but not batch invariant."""
    start = operand.shape[0].bit_length()
    return in_panels(direction, operand, weight, lambda count: [(start + i) % count for i in range(count)])


def in_panels(direction: str, operand: torch.Tensor, weight: Weight, order: Callable[[int], list[int]]) -> torch.Tensor:
    """Panels of terms are summed in fp32, and added to the result, in its dtype, in the given order. Every step is
    elementwise, so that nothing but the order can change a bit.
    """
    matrix = (weight.dense() if direction == FORWARD else weight.dense().t()).float()
    rows, terms = operand.float().unflatten(1, (-1, PANEL)), matrix.unflatten(1, (-1, PANEL))  # [m, p, 16], [n, p, 16]
    panels = torch.zeros(rows.shape[0], terms.shape[0], rows.shape[1], device=operand.device)
    for term in range(PANEL):
        panels += rows[:, None, :, term] * terms[None, :, :, term]
    total = torch.zeros_like(panels[..., 0], dtype=operand.dtype)
    for index in order(rows.shape[1]):
        total += panels[..., index].to(total.dtype)
    return total


def default_arms() -> list[CheckArm]:
    """The first is the product of both checks; default plans are only held to repeat."""
    return [
        CheckArm("batch_invariant", Role.PRODUCT.value, invariant),
        CheckArm("default plan", Role.PRODUCT.value, by_plan),
        CheckArm(
            "sums in order of arrival",
            Role.CONTROL.value,
            arrival_order,
            must=frozenset({REPEATS}),
            may=frozenset({ALONE}),
        ),
        CheckArm("order by number of rows", Role.CONTROL.value, order_by_rows, must=frozenset({ALONE})),
    ]
