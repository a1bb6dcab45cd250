"""The determinism gate: cells, checks, and the table of where batch invariance holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nybble.gate.checks import Check, CheckArm, CheckGate, Judged
from nybble.gate.determinism import arms
from nybble.gate.determinism.arms import ALONE, REPEATS, Act
from nybble.gate.dispatch import both_sides, boundaries, largest_that_fits, plan_of, shapes_that_fit
from nybble.gate.multiply import FORWARD, GRAD_INPUT, Weight, random_operand, random_weight
from nybble.gate.numerics.gate import thinned
from nybble.gate.runner import Report, Role

DEFAULT_PLAN = "default plan"
BYTES_A_WEIGHT = 10  # while it is drawn and quantised
CONTROL_SHAPE, CONTROL_ROWS = (64, 128), 16  # the controls sum term by term and need no size


@dataclass(frozen=True)
class Sizes:
    """shapes: (N, K). tokens: M of the repeats. largest: of the rows that are compared with rows alone.

    alone: how many rows are also multiplied alone.
    """

    shapes: Sequence[tuple[int, int]]
    tokens: Sequence[int]
    repeats: int
    largest: int
    alone: int = 16
    boundary_count: int | None = None


@dataclass(frozen=True)
class Cell:
    """One shape in one direction."""

    n: int
    k: int
    direction: str
    counts: tuple[int, ...]  # M at which rows are compared with rows alone

    @property
    def name(self) -> str:
        return f"{self.n}x{self.k} {self.direction}"


class DeterminismGate(CheckGate):
    """See the package docstring."""

    name = "determinism"
    question = "Does the same multiply give the same bits every time, and a row the same bits among any others?"

    def __init__(self, device: str, sizes: Sizes, seed: int = 0):
        self.device, self.sizes, self.seed = torch.device(device), sizes, seed
        self.arms: list[CheckArm] = arms.default_arms()
        self.left_out: dict[str, str] = {}
        self.invariance: dict[str, list[dict]] = {}
        self._weights: dict[tuple[int, int], Weight] = {}
        shapes = shapes_that_fit(self.device, sizes.shapes, BYTES_A_WEIGHT, self.left_out)
        self.cells = [self._cell(n, k, way) for n, k in shapes for way in (FORWARD, GRAD_INPUT)]

    def _cell(self, n: int, k: int, direction: str) -> Cell:
        largest = largest_that_fits(self.device, n, k, self.sizes.largest, self.left_out)
        weight = self._weight(n, k)
        counts = [largest, *(1 << bit for bit in range(largest.bit_length()))]
        for invariant in (False, True):
            found = boundaries(lambda m, invariant=invariant: plan_of(weight, m, direction, invariant), largest)
            counts = both_sides(thinned(found, self.sizes.boundary_count), counts, largest)
        return Cell(n, k, direction, tuple(counts))

    def _weight(self, n: int, k: int) -> Weight:
        if (n, k) not in self._weights:
            if len(self._weights) > 1:
                self._weights.clear()
            self._weights[n, k] = random_weight(n, k, self.device, self.seed)
        return self._weights[n, k]

    def prepare(self, cell: Cell) -> None:
        torch.manual_seed(self.seed)  # of the control that adds in a random order

    def judge(self, arm: CheckArm, cell: Cell, shared: None) -> Judged:
        control = arm.role == Role.CONTROL.value
        weight = self._weight(*(CONTROL_SHAPE if control else (cell.n, cell.k)))
        repeats, tokens = (8, (CONTROL_ROWS,)) if control else (self.sizes.repeats, self.sizes.tokens)
        changed, runs = 0, 0
        for m in tokens:
            changed += self._changed_repeats(arm.act, cell.direction, weight, m, repeats)
            runs += repeats
        counts = (1, 3, CONTROL_ROWS) if control else cell.counts
        rows = self._against_alone(arm.act, cell.direction, weight, counts)
        checks = [Check(REPEATS, changed == 0, f"{changed} of {runs} repeats differ from the first")]
        differ = [row["m"] for row in rows if row["differ"]]
        if arm.name == DEFAULT_PLAN:
            self.invariance[cell.name] = rows
        else:
            checks.append(Check(ALONE, not differ, f"rows differ from rows alone at M {differ}"))
        values = {"repeats": runs, "differ": changed, "rows_differ_at": differ, "counts": list(counts)}
        return Judged(checks, runs + sum(row["compared"] for row in rows), values)

    def _changed_repeats(self, act: Act, direction: str, weight: Weight, m: int, repeats: int) -> int:
        """How many repeats differ from the first, with poison in the memory that outputs and workspaces come from."""
        operand = random_operand(m, weight.columns(direction)[0], self.device, self.seed + m)
        first = act(direction, operand, weight)
        poison(first)
        changed = torch.zeros((), dtype=torch.int64, device=self.device)
        for index in range(repeats):
            again = act(direction, operand, weight)
            changed += (again != first).any()  # NaN differs from itself too
            if index % 64 == 0:
                poison(again)
            del again
        return int(changed)

    def _against_alone(self, act: Act, direction: str, weight: Weight, counts: Sequence[int]) -> list[dict]:
        """Per M: do rows among M have the bits of the same rows alone?"""
        columns, _ = weight.columns(direction)
        whole = random_operand(max(counts), columns, self.device, self.seed + 1)
        chosen = sorted({round(i * (max(counts) - 1) / (self.sizes.alone - 1)) for i in range(self.sizes.alone)})
        chosen = sorted({*chosen, *(m - 1 for m in counts)})
        alone = {row: act(direction, whole[row : row + 1], weight)[0] for row in chosen}
        found = []
        for m in counts:
            among = act(direction, whole[:m], weight)
            rows = [row for row in chosen if row < m]
            differ = sum(not torch.equal(among[row], alone[row]) for row in rows)
            plan = plan_of(weight, m, direction)
            found.append({"m": m, "compared": len(rows), "differ": differ, "path": plan.path, "variant": plan.variant})
        return found

    def after(self, report: Report) -> None:
        report.findings["default_plan_rows_alone"] = self.invariance


def poison(like: torch.Tensor) -> None:
    """Leaves NaN bits in the memory that the allocator will hand out next for tensors of this size and smaller ones."""
    workspace = 32 << 20 if like.is_cuda else 1 << 20
    for size in (like.numel() * like.element_size(), workspace):
        torch.full((max(1, size // 4),), float("nan"), device=like.device)
