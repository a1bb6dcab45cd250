"""A recycling pool of slots, small enough to be read whole: rolling or fixed, with copies that land early or late.

It stands for any trainer's pool, so it uses only the public `nybble.SlotPool` (owner checks), and not even that where
`checks` is off: then the ring is what a streaming trainer without nybble has.
"""

from __future__ import annotations

import dataclasses

import torch

import nybble
from nybble.gate.aliasing.cells import Cell, Ring
from nybble.gate.aliasing.layers import Base, Weight4Bit


class SlotRing:
    """Hands out a layer's weights as views of a recycled buffer.

    A late copy is one that is held back until acquire waits for it, the latest legal moment: no clock decides what a
    gate sees. On CUDA copies run on a side stream; acquire makes the compute stream wait. (The race gate delays copies
    by time.)
    """

    def __init__(self, base: Base, cell: Cell, *, checks: bool):
        self.base, self.cell = base, cell
        count = base.layers if cell.bypass else cell.slots
        self.buffers = [torch.zeros(base.blob_bytes, dtype=torch.uint8, device=base.device) for _ in range(count)]
        self.views = [base.views(buffer) for buffer in self.buffers]
        self.on_cuda = base.device.type == "cuda"
        self.side = torch.cuda.Stream(base.device) if self.on_cuda else None
        self.arrived = [None] * count  # CUDA: the event of the last refill
        self.content = [None] * count  # the layer that the slot was acquired for
        self.in_flight = [None] * count  # the layer whose refill was issued and not yet waited for
        self.cursor = 0
        self.loads = 0
        self.owners = Owners(self.buffers, base) if checks else None

    def acquire(self, layer: int) -> dict:
        """The weights of `layer`, safe to read on the current stream once this returns."""
        if self.cell.bypass:
            slot, ahead = layer, None
        elif self.cell.ring is Ring.ROLLING:
            slot, ahead = self.cursor % len(self.buffers), None
            self.cursor += 1
            self.content[slot] = None  # a rolling pool refills on every acquire, whatever the slot holds
        else:
            slot, ahead = layer % len(self.buffers), layer + (-1 if in_backward() else 1)
        self._issue(layer, slot)
        self._wait(layer, slot)
        if ahead is not None and 0 <= ahead < self.base.layers:
            self._issue(ahead, ahead % len(self.buffers))
        return self.views[slot] if self.owners is None else self.owners.stamped(layer, self.views[slot])

    def close(self) -> None:
        """Takes the slots out of the owner table; on CUDA waits for the copies, so that buffers may be freed."""
        if self.side is not None:
            self.side.synchronize()
        if self.owners is not None:
            self.owners.close()

    def _issue(self, layer: int, slot: int) -> None:
        if layer in (self.content[slot], self.in_flight[slot]):
            return
        self.content[slot], self.in_flight[slot] = None, layer
        self.loads += 1
        if self.owners is not None:
            self.owners.begin_fill(slot)
        if self.cell.ring is not Ring.FIXED_HELD:
            self._copy(layer, slot)
            if self.on_cuda and self.cell.ring is Ring.FIXED_PROMPT:
                torch.cuda.current_stream(self.base.device).wait_event(self.arrived[slot])

    def _copy(self, layer: int, slot: int) -> None:
        if not self.on_cuda:
            self.buffers[slot].copy_(self.base.blobs[layer])
            return
        compute = torch.cuda.current_stream(self.base.device)
        self.side.wait_stream(compute)  # reads of the slot's last content are enqueued there
        with torch.cuda.stream(self.side):
            self.buffers[slot].copy_(self.base.blobs[layer], non_blocking=True)
            self.arrived[slot] = self.side.record_event()

    def _wait(self, layer: int, slot: int) -> None:
        if self.in_flight[slot] == layer:
            if self.cell.ring is Ring.FIXED_HELD:
                self._copy(layer, slot)
            if self.on_cuda:
                torch.cuda.current_stream(self.base.device).wait_event(self.arrived[slot])
        self.content[slot], self.in_flight[slot] = layer, None
        if self.owners is not None:
            self.owners.ready(slot, layer)


class Owners:
    """The ring's entries in nybble's owner table."""

    def __init__(self, buffers: list[torch.Tensor], base: Base):
        self.pool = nybble.SlotPool()
        self.slots = [self.pool.add_slot(buffer) for buffer in buffers]
        self.uids = [self.pool.register(f"layer {layer}") for layer in range(base.layers)]

    def begin_fill(self, slot: int) -> None:
        self.pool.begin_fill(self.slots[slot])

    def ready(self, slot: int, layer: int) -> None:
        self.pool.ready(self.slots[slot], self.uids[layer])

    def stamped(self, layer: int, views: dict) -> dict:
        return {
            name: dataclasses.replace(value, uid=self.uids[layer]) if isinstance(value, Weight4Bit) else value
            for name, value in views.items()
        }

    def close(self) -> None:
        self.pool.close()


def in_backward() -> bool:
    """True inside a backward pass, and so inside a recompute."""
    return torch._C._current_graph_task_id() != -1
