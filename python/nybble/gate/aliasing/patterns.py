"""What each arm must compute in each cell: a model of slots and of the order in which autograd reads them.

A streamed layer's weight is bytes in a slot. An op can hold on to it in three ways, and autograd reads each at another
moment of a layer's backward:

    node has no saved tensor      reads its ctx BEFORE the layer is recomputed
    node has a saved tensor       unpacking it recomputes the layer first; then it reads
        what it saved             -> the view that the recompute acquired
        what it kept on ctx       -> the view that the first forward acquired, AFTER the recompute

The model replays a training step as acquires, landings of refills, and those reads, and notes every read whose slot
holds another layer. Gradients flow downwards, so one bad read at layer i spoils the layers 0..i. In closed form, with L
layers and n slots, the layers that stay right are the last

    rolling,  weight on ctx, the recompute stops before it acquires   n
    rolling,  weight on ctx, the recompute acquires                   ceil(n / 2)
    rolling,  scales on ctx, any mode                                 ceil(n / 2)
    fixed,    weight on ctx, late copy, adapters on q,v               n
    fixed,    weight on ctx, prompt copy or an adapter on the last projection     L
    fixed,    scales on ctx                                           L
    a private copy of the first forward's weight on ctx             L
    anything saved by save_for_backward, or a reentrant checkpoint    L

(rolling: the recompute of layer L-1-b takes slot (L+b) mod n, which is the slot of layer L-1-a when a+b+1 = 0 mod n.
The smallest such b is n-1-a, and it spoils layer L-1-a where b < a; so that layer stays right while a <= (n-1)/2.)

A read can also be right by luck: the bytes are there, but nobody had waited for the copy. The owner check calls that
stale too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nybble.gate.aliasing.cells import Cell, Mode, Ring, Stack

NOBODY = -1


class Keeps(Enum):
    """Where an op keeps its weight between forward and backward."""

    SAVED = "everything saved"  # save_for_backward: nybble's op, and torch's own
    SCALES_ON_CTX = "packed saved, scales on ctx"
    ALL_ON_CTX = "weight on ctx"
    COPY_ON_CTX = "a private copy of the first forward's weight on ctx"

    @property
    def saves_nothing(self) -> bool:
        return self in (Keeps.ALL_ON_CTX, Keeps.COPY_ON_CTX)


@dataclass(frozen=True)
class Pattern:
    """The outcome of one arm in one cell."""

    wrong: frozenset[int]  # layers whose gradients differ from the resident model's
    stale: bool  # some read found a slot that its weight did not own: an owner check raises

    @property
    def hides(self) -> bool:
        """True where an unsafe op gives right numbers."""
        return not self.wrong


class SlotModel:
    """The content and the owner of every slot; `owner` follows DESIGN's rule (nobody from issue to acquire)."""

    def __init__(self, cell: Cell, layers: int):
        self.cell, self.layers = cell, layers
        count = layers if cell.bypass else cell.slots
        self.content = [NOBODY] * count
        self.owner = [NOBODY] * count
        self.in_flight = [NOBODY] * count
        self.cursor = 0

    def issue(self, layer: int) -> None:
        slot = layer % len(self.content)
        if layer in (self.owner[slot], self.in_flight[slot]):
            return
        self.owner[slot], self.in_flight[slot] = NOBODY, layer
        if self.cell.ring is Ring.FIXED_PROMPT:
            self.content[slot] = layer

    def acquire(self, layer: int, *, backward: bool) -> int:
        if self.cell.bypass:
            slot = layer
            self.content[slot] = self.owner[slot] = layer
            return slot
        if self.cell.ring is Ring.ROLLING:
            slot = self.cursor % len(self.content)
            self.cursor += 1
            self.content[slot] = self.owner[slot] = layer
            return slot
        slot = layer % len(self.content)
        self.issue(layer)
        self.content[slot] = self.owner[slot] = layer
        self.in_flight[slot] = NOBODY
        ahead = layer - 1 if backward else layer + 1
        if 0 <= ahead < self.layers:
            self.issue(ahead)
        return slot


def recompute_acquires(cell: Cell, keeps: Keeps) -> bool:
    """False where early stop ends the recompute at the last saved tensor, before the slot is filled."""
    return cell.fill_first or not keeps.saves_nothing or cell.mode is not Mode.EARLY_STOP


def reads_ctx(cell: Cell, keeps: Keeps) -> tuple[bool, bool]:
    """Whether ctx is read (before, after) the recompute of the layer."""
    if keeps in (Keeps.SAVED, Keeps.COPY_ON_CTX):
        return False, False
    if keeps is Keeps.SCALES_ON_CTX:
        return False, True
    # The last projection owns no saved tensor, unless an adapter behind it does. The ones before it are read later.
    return cell.stack is not Stack.LLAMA_ALL, cell.is_llama


def predict(cell: Cell, keeps: Keeps, layers: int) -> Pattern:
    """Replays one training step of `layers` layers."""
    model = SlotModel(cell, layers)
    captured = [model.acquire(layer, backward=False) for layer in range(layers)]
    before, after = reads_ctx(cell, keeps)
    if cell.mode is Mode.REENTRANT:  # the layer's graph is rebuilt by the recompute: nothing older is ever read
        before = after = False
    bad: set[int] = set()
    stale = False
    for layer in reversed(range(layers)):
        slot = captured[layer]
        if before:
            bad |= {layer} if model.content[slot] != layer else set()
            stale |= model.owner[slot] != layer
        if recompute_acquires(cell, keeps):
            model.acquire(layer, backward=True)
        if after:
            bad |= {layer} if model.content[slot] != layer else set()
            stale |= model.owner[slot] != layer
    return Pattern(frozenset(range(max(bad) + 1)) if bad else frozenset(), stale)


def closed_form(cell: Cell, keeps: Keeps, layers: int) -> frozenset[int]:
    """The layers that the table above calls wrong: written apart from the model, so that each checks the other."""
    right = layers
    half = -(-cell.slots // 2)
    if cell.bypass or cell.mode is Mode.REENTRANT or keeps in (Keeps.SAVED, Keeps.COPY_ON_CTX):
        pass
    elif cell.ring is Ring.ROLLING:
        right = half if recompute_acquires(cell, keeps) else cell.slots
    elif cell.ring is Ring.FIXED_HELD and keeps is Keeps.ALL_ON_CTX and cell.stack is Stack.LLAMA_QV:
        right = cell.slots
    return frozenset(range(max(0, layers - right)))
