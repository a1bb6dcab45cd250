"""The numerics gate: rows, checks, and the kernel names behind the counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import nybble
from nybble.gate.checks import Check, CheckArm, CheckGate, Judged
from nybble.gate.dispatch import Plan, both_sides, boundaries, largest_that_fits, plan_of, shapes_that_fit
from nybble.gate.multiply import (
    FORWARD,
    GRAD_INPUT,
    Weight,
    dense_multiply,
    exact_multiply,
    moved,
    random_operand,
    random_weight,
)
from nybble.gate.numerics import arms
from nybble.gate.numerics.arms import ELEMENT, EQUAL, ERROR, LAUNCH
from nybble.gate.numerics.kernels import kernel_claims
from nybble.gate.numerics.measures import difference, relative_error, sum_excess
from nybble.gate.runner import Claim, Report, Role

LARGEST_RATIO = 1.05  # of the error against float64, to torch's on the same weights
LARGEST_EXCESS = 64.0  # units of measures.sum_excess; torch's own multiply must stay below it too
LARGEST_CONTROL = 2048  # tokens
BYTES_A_WEIGHT = 14  # float64, fp32 and what a control changes; 3 more for each seed: bf16 and packed
EXACT_ROWS = 256  # rows of a result that are compared with float64


@dataclass(frozen=True)
class Cell:
    """One (shape, M, seed) in one direction."""

    n: int
    k: int
    m: int
    seed: int
    direction: str
    plan: Plan

    @property
    def name(self) -> str:
        return f"{self.n}x{self.k} M {self.m} seed {self.seed} {self.direction}"


@dataclass
class Known:
    """A weight, and what cells of its shape would otherwise compute again. along: float64 norms of what a column of a
    result is a sum over, by direction.
    """

    weight: Weight
    dense: torch.Tensor
    along: dict[str, torch.Tensor]


@dataclass
class Shared:
    """What all arms of a cell use. rows: indices of the result that are compared with float64."""

    weight: Weight
    operand: torch.Tensor
    dense: torch.Tensor  # result of torch on the dequantised weight
    rows: torch.Tensor
    exact: torch.Tensor  # float64, of those rows
    scale: torch.Tensor  # norms' products of those rows
    dense_error: float


@dataclass(frozen=True)
class Sizes:
    """shapes: (N, K). tokens: M beside those at the boundaries. boundary_count: at most so many boundaries a shape.
    rows_wanted: (shape, M, seed), below which there is no verdict.
    """

    shapes: Sequence[tuple[int, int]]
    tokens: Sequence[int]
    largest: int
    seeds: int = 1
    boundary_count: int | None = None
    rows_wanted: int = 1


class NumericsGate(CheckGate):
    """See the package docstring."""

    name = "numerics"
    question = (
        "Is the fused multiply as exact as dequantise + linear, in both directions, on both sides of every dispatch?"
    )

    def __init__(self, device: str, sizes: Sizes, seed: int = 0):
        self.device, self.sizes, self.seed = torch.device(device), sizes, seed
        self.arms: list[CheckArm] = arms.default_arms()
        self.left_out: dict[str, str] = {}
        self.boundaries: dict[str, list[int]] = {}
        self._known: dict[tuple[int, int, int], Known] = {}
        shapes = shapes_that_fit(self.device, sizes.shapes, BYTES_A_WEIGHT + 3 * sizes.seeds, self.left_out)
        self.cells = [cell for n, k in shapes for cell in self._cells_of(n, k)]

    def _cells_of(self, n: int, k: int) -> list[Cell]:
        cells = []
        for direction in (FORWARD, GRAD_INPUT):
            weight = self._weight(n, k, 0)

            def plan_at(m: int, weight=weight, direction=direction) -> Plan:
                return plan_of(weight, m, direction)

            largest = largest_that_fits(self.device, n, k, self.sizes.largest, self.left_out)
            found = boundaries(plan_at, largest)
            self.boundaries[f"{n}x{k} {direction}"] = found
            kept = thinned(found, self.sizes.boundary_count)
            if len(kept) < len(found):
                self.left_out[f"{n}x{k} {direction}"] = f"{len(found) - len(kept)} of {len(found)} boundaries: --full"
            for m in both_sides(kept, self.sizes.tokens, largest):
                cells += [Cell(n, k, m, seed, direction, plan_at(m)) for seed in range(self.sizes.seeds)]
        return cells

    def _weight(self, n: int, k: int, seed: int) -> Weight:
        return self._known_of(n, k, seed).weight

    def _known_of(self, n: int, k: int, seed: int) -> Known:
        """The last weights that were asked for are kept: cells of one shape follow each other."""
        key = n, k, seed
        if key not in self._known:
            if len(self._known) > self.sizes.seeds:
                self._known.clear()
            weight = random_weight(n, k, self.device, self.seed + 1000 * seed)
            matrix = weight.dense()
            along = {way: matrix.double().norm(dim=dim) for way, dim in ((FORWARD, 1), (GRAD_INPUT, 0))}
            self._known[key] = Known(weight, matrix, along)
        return self._known[key]

    def runs(self, arm: CheckArm, cell: Cell) -> bool:
        """Where the plan itself dequantises, there is no fused multiply to put a fault into. Later seeds and the
        largest M are there for the product.
        """
        if arm.role == Role.CONTROL.value and (cell.seed > 0 or cell.m > LARGEST_CONTROL):
            return False
        return cell.plan.path != "dequant" or arm.role != Role.CONTROL.value or arm.name.startswith("dequant")

    def prepare(self, cell: Cell) -> Shared:
        known = self._known_of(cell.n, cell.k, cell.seed)
        columns, _ = known.weight.columns(cell.direction)
        operand = random_operand(cell.m, columns, self.device, self.seed + 1000 * cell.seed + cell.m)
        dense = dense_multiply(cell.direction, operand, known.dense)
        rows = torch.linspace(0, cell.m - 1, min(cell.m, EXACT_ROWS), device=self.device).round().long().unique()
        exact = exact_multiply(cell.direction, operand[rows], known.dense)
        scale = operand[rows].double().norm(dim=1)[:, None] * known.along[cell.direction][None, :]
        return Shared(known.weight, operand, dense, rows, exact, scale, relative_error(dense[rows], exact))

    def judge(self, arm: CheckArm, cell: Cell, shared: Shared) -> Judged:
        before = nybble.path_counters()
        result = arm.act(cell.direction, shared.operand, shared.weight)
        launched = moved(before, nybble.path_counters())
        apart = difference(result, shared.dense)
        rows = result[shared.rows]
        error = relative_error(rows, shared.exact)
        ratio = error / shared.dense_error if shared.dense_error else float("inf")
        excess = sum_excess(rows, shared.exact, shared.scale)
        checks = [
            Check(ERROR, ratio <= LARGEST_RATIO, f"{ratio:.4f} of torch's error against float64"),
            Check(ELEMENT, excess <= LARGEST_EXCESS, f"an element is {excess:.1f} units off beyond its rounding"),
        ]
        if arm.role != Role.NATIVE.value:
            path = "dequant" if arm.name.startswith("dequant") else cell.plan.path
            expected = {f"{path}.{cell.direction}": 1}
            if arm.name in ("auto", "dequant", "dense path taken silently"):
                checks.append(Check(LAUNCH, launched == expected, f"launches {launched}, expected {expected}"))
            if path == "dequant":
                equal = apart.max_abs == 0 and apart.equal_share == 1
                checks.append(Check(EQUAL, equal, f"{apart.equal_share:.6f} of the elements are equal"))
        values = {
            "path": cell.plan.path,
            "max_abs": apart.max_abs,
            "max_ulp": apart.max_ulp,
            "equal_share": apart.equal_share,
            "error": error,
            "dense_error": shared.dense_error,
            "ratio": ratio,
            "excess": excess,
        }
        return Judged(checks, result.numel(), {k: tidy(v) for k, v in values.items()})

    def claims(self) -> list[Claim]:
        return kernel_claims(self.cells, self._weight, self.device, self.left_out)

    def after(self, report: Report) -> None:
        """A card that is nearly full may leave too few rows for what was asked: that accuses nobody."""
        rows = len({(cell.n, cell.k, cell.m, cell.seed) for cell in self.cells})
        if rows < self.sizes.rows_wanted:
            short = f"{rows} (shape, M, seed) rows, expected at least {self.sizes.rows_wanted}"
            cut = "; the rest did not fit into the free memory, see what was not run" if self.left_out else ""
            report.faults.append(short + cut)
        report.findings |= {"boundaries": self.boundaries, "rows": rows, "rows_wanted": self.sizes.rows_wanted}


def thinned(found: list[int], count: int | None) -> list[int]:
    """At most `count` of them, evenly spread, first and last included."""
    if count is None or len(found) <= count:
        return found
    return sorted({found[round(i * (len(found) - 1) / (count - 1))] for i in range(count)})


def tidy(value):
    """Floats to six digits, so that a record of thousands of rows stays small."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
