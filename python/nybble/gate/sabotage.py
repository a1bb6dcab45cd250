"""Faults to plant in any gate of checks: what each way in which it must not say ok looks like."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from nybble.gate.checks import Judged
from nybble.gate.runner import Role


def faulty_product(control: str) -> Callable[[Any], None]:
    """The product does what the control `control` does: exit 1."""

    def plant(gate: Any) -> None:
        act = next(arm.act for arm in gate.arms if arm.name == control)
        gate.arms[0] = dataclasses.replace(gate.arms[0], act=act)

    plant.__doc__ = faulty_product.__doc__
    return plant


def cured_controls(gate: Any) -> None:
    """The controls do what the product does, so nothing shows that the gate can see a defect: exit 2."""
    cure = gate.arms[0].act
    gate.arms = [dataclasses.replace(arm, act=cure) if arm.role == Role.CONTROL.value else arm for arm in gate.arms]


def nothing_compared(gate: Any) -> None:
    """No element reaches the checks: exit 3."""
    judge = gate.judge

    def empty(arm, cell, shared) -> Judged:
        return dataclasses.replace(judge(arm, cell, shared), checks=[], compared=0)

    gate.judge = empty
