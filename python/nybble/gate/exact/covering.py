"""Few cells that hold every pair: a covering array of strength two."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

Factors = Mapping[str, Sequence[Hashable]]


def pairs_of(cell: Mapping[str, Any]) -> set[frozenset]:
    """Every pair of (factor, value) in a cell."""
    return {frozenset(pair) for pair in itertools.combinations(cell.items(), 2)}


def all_pairs(factors: Factors) -> set[frozenset]:
    """What a covering array must hold."""
    found = set()
    for (a, a_values), (b, b_values) in itertools.combinations(factors.items(), 2):
        found |= {frozenset(((a, x), (b, y))) for x in a_values for y in b_values}
    return found


def covering(factors: Factors) -> list[dict[str, Any]]:
    """Cells that hold every pair, found greedily; the same for the same factors."""
    candidates = [
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    ]  # few hundred: the search is exhaustive at each step
    missing, cells = all_pairs(factors), []
    while missing:
        best = max(candidates, key=lambda cell: len(pairs_of(cell) & missing))
        missing -= pairs_of(best)
        cells.append(best)
    return cells
