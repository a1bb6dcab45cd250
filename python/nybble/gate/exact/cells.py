"""The cells of the exact gate: every pair of values that fits into the memory that is free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nybble.gate import room
from nybble.gate.exact import covering
from nybble.gate.exact.models import TARGETS
from nybble.gate.training.footprint import models_bytes, outcome_bytes, step_bytes
from nybble.gate.training.store import Shape

POLICIES = ("recompute", "reentrant", "keep")
LATE_WINDOW = 2


@dataclass(frozen=True)
class Sizes:
    """shapes: by name. late, ordinary: the ring's options for cells with late copies and for the others."""

    shapes: dict[str, Shape]
    tokens: tuple[int, ...]
    windows: tuple[int, ...]
    ordinary: dict[str, Any]
    late: dict[str, Any]


@dataclass(frozen=True)
class ExactCell:
    """One combination. late: copies land so late that an unrepaired op must read what was there before."""

    shape: str
    targets: str
    window: int
    tokens: int
    policy: str
    late: bool = False

    @property
    def name(self) -> str:
        late = ", late copies" if self.late else ""
        return f"{self.shape} | {self.targets} | window {self.window} | {self.tokens} tokens | {self.policy}{late}"


def cells_of(sizes: Sizes, free: int | None = None) -> list[ExactCell]:
    """Every pair, then a cell with late copies for each shape, as far as they fit into `free` bytes (None: all do);
    what shares models lies together.
    """
    found = [ExactCell(**values) for values in covering.covering(factors(sizes), fits(sizes, free))]
    found += [cell for cell in late_cells(sizes) if room.fits(bytes_of(cell, sizes), free)]
    shapes, targets = list(sizes.shapes), list(TARGETS)
    return sorted(found, key=lambda cell: (shapes.index(cell.shape), targets.index(cell.targets)))


def late_cells(sizes: Sizes) -> list[ExactCell]:
    # An adapter on down_proj makes the unrepaired op right by luck: it starts the recomputation first.
    return [ExactCell(name, "qv", LATE_WINDOW, sizes.tokens[0], "recompute", late=True) for name in sizes.shapes]


def fits(sizes: Sizes, free: int | None) -> covering.Fits:
    """Whether a combination fits into `free` bytes."""
    return lambda values: room.fits(bytes_of(ExactCell(**values), sizes), free)


def left_out(sizes: Sizes, free: int | None) -> dict[str, str]:
    """Values and pairs of values that occur in no combination that fits, and why."""
    found: dict[str, str] = {}
    kept = covering.all_pairs(factors(sizes), fits(sizes, free))
    every = covering.combinations(factors(sizes))
    alone = {item for pair in kept for item in pair}
    lost = {frozenset({(name, value)}) for name, values in factors(sizes).items() for value in values} - {
        frozenset({item}) for item in alone
    }
    lost |= {pair for pair in covering.all_pairs(factors(sizes)) - kept if pair <= alone}
    for items in sorted(lost, key=lambda items: (len(items), sorted(map(str, items)))):
        need = min(bytes_of(ExactCell(**cell), sizes) for cell in every if items <= cell.items())
        found[", ".join(f"{name} {value}" for name, value in sorted(items))] = room.why(need, free)
    late = room.fitting(late_cells(sizes), lambda cell: bytes_of(cell, sizes), free)[1]
    return found | late


def batch(cell: ExactCell) -> tuple[int, int]:
    """Sequences and their length: one sequence, or two where they are long."""
    rows = 2 if cell.tokens >= 256 else 1
    return rows, cell.tokens // rows


def bytes_of(cell: ExactCell, sizes: Sizes) -> float:
    """The models of the cell's shape, the references so far, which are all kept, and a step with its outcome."""
    shape = sizes.shapes[cell.shape]
    lengths = [tokens for tokens in sizes.tokens if tokens <= cell.tokens]
    references = sum(outcome_bytes(own, tokens) for own in sizes.shapes.values() for tokens in lengths)
    step = step_bytes(shape, *batch(cell), keep=cell.policy == "keep") + outcome_bytes(shape, cell.tokens)
    return models_bytes(shape, (*sizes.windows, LATE_WINDOW)) + len(TARGETS) * references + step


def factors(sizes: Sizes) -> covering.Factors:
    return {
        "shape": tuple(sizes.shapes),
        "targets": tuple(TARGETS),
        "window": sizes.windows,
        "tokens": sizes.tokens,
        "policy": POLICIES,
    }
