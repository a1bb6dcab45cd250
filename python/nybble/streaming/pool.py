"""SlotPool: the owner check for a trainer that recycles its own weight buffers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from . import native


class SlotPool:
    """Says which weight each recycled buffer holds, so that a multiply that would read another one raises.

    The pool owns no memory and copies nothing. For each buffer and refill, in this order:

        slot = pool.add_slot(buffer)            # once: a tensor, or several that are refilled together
        uid = pool.register("layers.3.q_proj")  # once per weight: give it to nybble.nf4_linear(..., guard=uid)
        after_now = pool.begin_fill(slot)       # before the first byte
        ... copy; if after_now, the copy waits for all compute enqueued now, else only for what was enqueued at release
        pool.ready(slot, uid)                   # once the compute stream has been told to wait for the copy
        ... multiplies
        pool.release(slot)                      # after the last use; reads stay legal until the next begin_fill

    A copy that fails or is interrupted is followed by begin_fill, never by ready: the slot then holds nothing.
    """

    def __init__(self):
        self._slots: dict[int, list[torch.Tensor]] = {}
        self._owners: list[int] = []
        self._released: set[int] = set()
        self._end = weakref.finalize(self, _forget, self._slots, self._owners)

    def add_slot(self, buffer: torch.Tensor | Sequence[torch.Tensor]) -> int:
        """A slot made of the bytes of one contiguous tensor or several, any dtype and device; the pool keeps them
        alive. ValueError for a tensor that is empty, not contiguous or overlaps a registered slot.
        """
        tensors = [buffer] if isinstance(buffer, torch.Tensor) else list(buffer)
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ValueError(
                    f"a slot buffer has strides {tensor.stride()} for shape {list(tensor.shape)}, expected contiguous"
                )
        slot = native.register_slot(tensors)
        self._slots[slot] = tensors
        return slot

    def remove_slot(self, slot: int) -> None:
        """Forgets a slot: a weight read from its bytes with a uid has then left the ring."""
        if self._slots.pop(slot, None) is not None:
            native.lib.nybble_unregister_slot(slot)

    def register(self, name: str, weights: Sequence[str] = ()) -> torch.Tensor | list[torch.Tensor]:
        """The uid of a weight, a 0-dim int64 tensor on the CPU. With `weights`, one uid each for weights that share
        slots (the projections of a layer): ready() with any of them makes the slot hold all.
        """
        uid = native.register_owner(name, weights)
        self._owners.append(uid)
        uids = [torch.tensor(uid + index, dtype=torch.int64) for index in range(max(1, len(weights)))]
        return uids if weights else uids[0]

    def begin_fill(self, slot: int) -> bool:
        """From here on the slot holds nothing, and autograd sees its tensors as modified. True: it was read after
        its last release, or never released, so the copy must wait for everything enqueued so far.
        """
        unreleased = native.slot_owner(slot)[0] != -1 and slot not in self._released
        read = native.begin_fill(slot)
        self._released.discard(slot)
        for tensor in self._slots[slot]:
            torch.autograd.graph.increment_version(tensor)
        return read or unreleased

    def ready(self, slot: int, uid: torch.Tensor | int) -> None:
        """The slot holds the weight from here on, for work enqueued after this call."""
        native.check(native.lib.nybble_set_owner(slot, int(uid)))

    def release(self, slot: int) -> None:
        """What was enqueued so far is the last use of the slot, unless begin_fill says otherwise."""
        native.check(native.lib.nybble_release_slot(slot))
        self._released.add(slot)

    def close(self) -> None:
        """Forgets every slot and weight."""
        self._end()
        self._slots.clear()
        self._released.clear()

    def holds(self, slot: int) -> tuple[int, int]:
        """Uid of the slot's owner (-1: nobody) and its generation, the number of refills begun."""
        owner, generation, _ = native.slot_owner(slot)
        return owner, generation


def _forget(slots: dict, owners: list) -> None:
    for slot in slots:
        native.lib.nybble_unregister_slot(slot)
    for uid in owners:
        native.lib.nybble_forget_owner(uid)
