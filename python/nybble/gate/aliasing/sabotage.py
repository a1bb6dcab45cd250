"""Faults to plant in the gate, one for each way in which it must not say ok."""

from __future__ import annotations

import dataclasses

import torch

from nybble.gate.aliasing import arms
from nybble.gate.aliasing.gate import AliasingGate
from nybble.gate.runner import Outcome


def unsafe_product(gate: AliasingGate) -> None:
    """The product keeps its weight on ctx, and nobody checks owners: exit 1."""
    gate.arms[0] = dataclasses.replace(gate.arms[0], multiply=arms.weight_on_ctx, checks=False)


def safe_control(gate: AliasingGate) -> None:
    """The controls have been cured, so nothing shows that the harness can see the defect: exit 2."""
    gate.arms = [dataclasses.replace(arm, multiply=arms.product) if arm.role == "control" else arm for arm in gate.arms]


def nothing_compared(gate: AliasingGate) -> None:
    """The names of the gradients match nothing: exit 3."""
    _edit(gate, lambda outcome: dataclasses.replace(outcome, backward=[{} for _ in outcome.backward]))


def zero_adapters(gate: AliasingGate) -> None:
    """LoRA B is zero, so every gradient of A is zero whatever the weights are: exit 3."""
    _edit(
        gate,
        lambda outcome: dataclasses.replace(outcome, nonzero=[torch.zeros_like(value) for value in outcome.nonzero]),
    )


def unrepeatable(gate: AliasingGate) -> None:
    """The reference does not equal itself: exit 3."""

    def noisy(outcome: Outcome) -> Outcome:
        return dataclasses.replace(
            outcome, forward=[{n: v + torch.randn_like(v) for n, v in part.items()} for part in outcome.forward]
        )

    _edit(gate, noisy)


def other_path(gate: AliasingGate) -> None:
    """The product's numbers come from an op that launches no kernel of ours: exit 3."""
    gate.arms[0] = dataclasses.replace(gate.arms[0], multiply=arms.bitsandbytes)


def _edit(gate: AliasingGate, edit) -> None:
    run = gate._run
    gate._run = lambda arm, cell, steps: [edit(outcome) for outcome in run(arm, cell, steps)]


SABOTAGES = {
    "unsafe-product": unsafe_product,
    "safe-control": safe_control,
    "nothing-compared": nothing_compared,
    "zero-adapters": zero_adapters,
    "unrepeatable": unrepeatable,
    "other-path": other_path,
}
