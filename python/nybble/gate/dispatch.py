"""Where the plan changes over M: read from the plan itself, never from constants."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import nybble
from nybble.gate import room
from nybble.gate.multiply import Weight

_PLAN = re.compile(
    r"(?P<path>\w+) variant (?P<variant>\d+), grid (?P<grid>\d+), split (?P<split>\d+), group (?P<group>\d+), "
    r"workspace (?P<workspace>\d+) bytes(?P<invariant>, batch invariant)?(?P<measured>, measured)?"
)
DENSE_PROBES, PROBE_STEP = 1024, 64  # every M up to the first, then every multiple of the second


@dataclass(frozen=True)
class Plan:
    """What nybble.explain() says of one problem."""

    path: str
    variant: int
    split: bool  # the reduction is cut into pieces
    workspace_bytes: int
    batch_invariant: bool
    text: str

    @property
    def dispatch(self) -> tuple:
        """What must be equal for two M to run the same code."""
        return self.path, self.variant, self.split, self.batch_invariant


def plan_of(weight: Weight, m: int, direction: str, batch_invariant: bool = False, dtype=torch.bfloat16) -> Plan:
    """The plan for m rows; no operand of that size is made."""
    columns, _ = weight.columns(direction)
    operand = torch.empty(1, columns, dtype=dtype, device=weight.packed.device).expand(m, columns)
    text = nybble.explain(operand, weight.packed, weight.state, direction=direction, batch_invariant=batch_invariant)
    found = _PLAN.match(text)
    if found is None:  # the reason why nothing fused takes it
        return Plan("dequant", 0, False, 0, False, text)
    return Plan(
        found["path"],
        int(found["variant"]),
        int(found["split"]) > 1,
        int(found["workspace"]),
        found["invariant"] is not None,
        text,
    )


def boundaries(plan_at: Callable[[int], Plan], largest: int) -> list[int]:
    """Every M below `largest` whose dispatch differs from that of M + 1, as far as probes and bisection between them
    see it.
    """
    probes = sorted({*range(1, min(DENSE_PROBES, largest) + 1), *range(PROBE_STEP, largest + 1, PROBE_STEP), largest})
    known: dict[int, tuple] = {}

    def at(m: int) -> tuple:
        if m not in known:
            known[m] = plan_at(m).dispatch
        return known[m]

    def between(low: int, high: int) -> list[int]:
        if at(low) == at(high):
            return []
        middle = (low + high) // 2
        return [low] if middle == low else between(low, middle) + between(middle, high)

    return [edge for low, high in itertools.pairwise(probes) for edge in between(low, high)]


def both_sides(found: Sequence[int], extra: Sequence[int], largest: int) -> list[int]:
    """M on both sides of every boundary, and the extra ones, ascending."""
    return sorted({m for low in found for m in (low, low + 1)} | {m for m in extra if m <= largest})


def largest_that_fits(device: torch.device, n: int, k: int, wanted: int, left_out: dict[str, str]) -> int:
    """The largest M, at most `wanted`, whose operands fit a quarter of the free memory; `left_out` learns of a cut."""
    free = room.available(device)
    if free is None:
        return wanted
    fits = int(free / 4 / (8 * (n + k)))
    if fits < wanted:
        left_out[f"{n}x{k}, M above {fits}"] = f"{free >> 20} MiB are free"
    return min(wanted, fits)


def shapes_that_fit(
    device: torch.device, shapes: Sequence[tuple[int, int]], bytes_a_weight: float, left_out: dict[str, str]
) -> list[tuple[int, int]]:
    """The shapes (N, K) whose weights fit in every form that the gate needs, in three quarters of the free memory."""
    free = room.available(device)
    kept = []
    for n, k in shapes:
        need = bytes_a_weight * n * k
        if free is None or room.fits(need, free * 3 // 4):
            kept.append((n, k))
        else:
            left_out[f"{n}x{k}"] = room.why(need, free * 3 // 4) + " beside the operands"
    return kept
