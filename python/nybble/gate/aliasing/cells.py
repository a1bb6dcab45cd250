"""The cells of the aliasing gate: one cell is one way to recycle slots under one checkpoint mode."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import Enum


class Ring(Enum):
    """How the ring chooses a slot, and when a refill's bytes land."""

    ROLLING = "rolling"  # every acquire takes the next slot and fills it there and then
    FIXED_HELD = "fixed, late copy"  # slot = layer mod slots, prefetched; the bytes land when acquire waits for them
    FIXED_PROMPT = "fixed, prompt copy"  # as above, but the bytes land when the prefetch is issued


class Stack(Enum):
    """What one checkpointed region computes."""

    LINEAR_FILL_LAST = (
        "linear, filled last"  # scale, acquire, multiply: the acquire follows the last native saved tensor
    )
    LINEAR_FILL_FIRST = "linear, filled first"  # acquire, scale, multiply
    LLAMA_QV = "llama, adapters on q,v"  # nothing is saved after the last projection
    LLAMA_ALL = "llama, adapters on all"  # the adapter of the last projection saves its input


class Mode(Enum):
    """How torch.utils.checkpoint recomputes the region."""

    EARLY_STOP = "early stop"
    NO_EARLY_STOP = "no early stop"
    REENTRANT = "reentrant"


@dataclass(frozen=True)
class Cell:
    """One configuration in which every arm runs."""

    stack: Stack
    ring: Ring
    mode: Mode
    slots: int
    bypass: bool = False  # every layer has a buffer of its own: nothing is recycled

    @property
    def name(self) -> str:
        return f"{self.stack.value} | {self.ring.value} | {self.mode.value} | {self.slots} slots"

    @property
    def fill_first(self) -> bool:
        return self.stack is not Stack.LINEAR_FILL_LAST

    @property
    def is_llama(self) -> bool:
        return self.stack in (Stack.LLAMA_QV, Stack.LLAMA_ALL)


GROUPS: tuple[tuple[Stack, Ring], ...] = (
    (Stack.LINEAR_FILL_LAST, Ring.ROLLING),
    (Stack.LINEAR_FILL_FIRST, Ring.ROLLING),
    (Stack.LLAMA_QV, Ring.FIXED_HELD),
    (Stack.LLAMA_QV, Ring.FIXED_PROMPT),
    (Stack.LLAMA_ALL, Ring.FIXED_HELD),
)


def all_cells(slots: tuple[int, ...], *, bypass: bool = False) -> list[Cell]:
    """Every cell for these slot counts, in the order of the printed table."""
    return [
        Cell(stack, ring, mode, count, bypass) for (stack, ring), mode, count in itertools.product(GROUPS, Mode, slots)
    ]
