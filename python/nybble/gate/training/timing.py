"""Times of arms that take turns, and what may be said of them."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

LARGEST_SPREAD = 0.05  # of the rounds of an arm; above it there is no verdict
LEAST_PAIRS = 5  # rounds behind any statement about two arms


@dataclass(frozen=True)
class Interval:
    """A relative difference with its 95% bootstrap interval."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.1%} ({self.low:.1%} .. {self.high:.1%})"


@dataclass
class Turns:
    """Per arm, one entry a round: seconds, seconds until everything was enqueued, and the span of wall clock.
    taken: rounds, with those that were dropped.
    """

    seconds: dict[str, list[float]]
    host_seconds: dict[str, list[float]]
    spans: dict[str, list[tuple[float, float]]]
    taken: int = 0


@dataclass(frozen=True)
class Rounds:
    """count: rounds that are kept, the last ones. Until those of every `steady` arm spread over at most LARGEST_SPREAD
    more are taken, up to `most`: a card under its power limit needs a while to settle.
    """

    count: int
    most: int = 0
    steady: Sequence[str] = ()

    def enough(self, turns: Turns, taken: int) -> bool:
        if taken < self.count:
            return False
        settled = all(spread(turns.seconds[name][-self.count :]) <= LARGEST_SPREAD for name in self.steady)
        return settled or taken >= self.most


def take_turns(
    arms: dict[str, Callable[[], None]],
    rounds: Rounds,
    device: torch.device,
    seed: int = 0,
    warm: dict[str, Callable[[], None]] | None = None,
) -> Turns:
    """Runs every arm once a round, in an order that is shuffled anew for each. warm: what an arm does right before its
    turn, untimed: a card that has idled or did something else runs at another clock for a while. Without it, one round
    does not count. Python's garbage is collected between rounds only: a collection takes as long as some steps.
    """
    order, shuffle = list(arms), random.Random(seed)
    for name in order if warm is None else ():
        arms[name]()
    turns = Turns(*({name: [] for name in arms} for _ in range(3)))
    collecting = gc.isenabled()
    gc.disable()
    try:
        while not rounds.enough(turns, turns.taken):
            gc.collect()
            shuffle.shuffle(order)
            for name in order:
                if warm is not None:
                    warm[name]()
                take_turn(turns, name, arms[name], device)
            turns.taken += 1
    finally:
        if collecting:
            gc.enable()
    for kept in (turns.seconds, turns.host_seconds, turns.spans):
        for values in kept.values():
            del values[: -rounds.count]
    return turns


def take_turn(turns: Turns, name: str, act: Callable[[], None], device: torch.device) -> None:
    """One arm, once, timed."""
    synchronize(device)
    began, start = time.time(), time.perf_counter()
    act()
    enqueued = time.perf_counter()
    synchronize(device)
    turns.seconds[name].append(time.perf_counter() - start)
    turns.host_seconds[name].append(enqueued - start)
    turns.spans[name].append((began, time.time()))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def spread(times: Sequence[float]) -> float:
    """(max - min) / median of the rounds."""
    return (max(times) - min(times)) / statistics.median(times)


def saving(base: Sequence[float], other: Sequence[float], draws: int = 2000, seed: int = 0) -> Interval:
    """Share of base's time that other saves, from pairs of one round; bootstrap over the pairs."""
    if len(base) != len(other) or not base:
        raise ValueError(f"{len(base)} and {len(other)} rounds, expected equally many, not none")
    pairs = [(a - b) / a for a, b in zip(base, other, strict=True)]
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(pairs, k=len(pairs))) for _ in range(draws))
    return Interval(statistics.median(pairs), medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1])


def timing_faults(times: dict[str, list[float]], names: Sequence[str]) -> list[str]:
    """Why these times carry no verdict."""
    faults = []
    for name in names:
        if len(times[name]) < LEAST_PAIRS:
            faults.append(f"{name}: {len(times[name])} rounds, expected at least {LEAST_PAIRS}")
        elif spread(times[name]) > LARGEST_SPREAD:
            faults.append(f"{name}: rounds spread over {spread(times[name]):.1%}, at most {LARGEST_SPREAD:.0%}")
    return faults
