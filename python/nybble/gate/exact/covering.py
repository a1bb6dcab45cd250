"""Few cells that hold every pair: a covering array of strength two."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

Factors = Mapping[str, Sequence[Hashable]]
Fits = Callable[[Mapping[str, Any]], bool]


def always(_cell: Mapping[str, Any]) -> bool:
    return True


def pairs_of(cell: Mapping[str, Any]) -> set[frozenset]:
    """Every pair of (factor, value) in a cell."""
    return {frozenset(pair) for pair in itertools.combinations(cell.items(), 2)}


def combinations(factors: Factors, fits: Fits = always) -> list[dict[str, Any]]:
    """Every combination that fits."""
    found = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return [cell for cell in found if fits(cell)]


def all_pairs(factors: Factors, fits: Fits = always) -> set[frozenset]:
    """What a covering array must hold: the pairs of all combinations that fit."""
    return set().union(*map(pairs_of, combinations(factors, fits)))


def covering(factors: Factors, fits: Fits = always) -> list[dict[str, Any]]:
    """Cells that fit and hold every such pair, found greedily; the same for the same factors."""
    candidates = combinations(factors, fits)  # few hundred: the search is exhaustive at each step
    missing, cells = all_pairs(factors, fits), []
    while missing:
        best = max(candidates, key=lambda cell: len(pairs_of(cell) & missing))
        missing -= pairs_of(best)
        cells.append(best)
    return cells
