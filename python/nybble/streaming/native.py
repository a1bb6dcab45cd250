"""The streaming core through its C ABI: host arena, slot ring, owners. Contracts: include/nybble/stream.h."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_uint64, c_void_p

import torch

from .._library import lib
from ..errors import StaleWeightError, check

FORWARD, BACKWARD, REPEAT = 0, 1, 2  # orders of the schedule
STATES = ("empty", "loading", "held", "released")
_WAIT_MS = 50  # a wait is cut into slices so that Ctrl-C gets through

_Observer = ctypes.CFUNCTYPE(c_int32, c_void_p, c_int32, c_int32, c_int64, c_int64)


class _Options(ctypes.Structure):
    _fields_ = [
        ("prefetch", c_int32),
        ("poison", c_int32),
        ("on_cuda", c_int32),
        ("device", c_int32),
        ("land_at_wait", c_int32),
        ("delay_us", c_int64),
        ("chunk_bytes", c_int64),
        ("observer", _Observer),
        ("context", c_void_p),
    ]


class _Status(ctypes.Structure):
    _fields_ = [("state", c_int32), ("layer", c_int32), ("owner", c_int64), ("generation", c_uint64)]


class _Stats(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("visits", "hits", "refills", "refill_bytes", "cancelled", "failed")]


_SIGNATURES = {
    "nybble_register_owner": [c_char_p, POINTER(c_char_p), c_int32, POINTER(c_int64)],
    "nybble_forget_owner": [c_int64],
    "nybble_register_slot": [POINTER(c_void_p), POINTER(c_int64), c_int32, POINTER(c_int64)],
    "nybble_unregister_slot": [c_int64],
    "nybble_begin_fill": [c_int64, POINTER(c_int32)],
    "nybble_set_owner": [c_int64, c_int64],
    "nybble_release_slot": [c_int64],
    "nybble_slot_owner": [c_int64, POINTER(c_int64), POINTER(c_uint64), POINTER(c_int32)],
    "nybble_verify_owner": [c_int64, POINTER(c_void_p), c_int32],
    "nybble_arena_new": [POINTER(c_void_p)],
    "nybble_arena_new_shared": [POINTER(c_void_p), POINTER(c_int32)],
    "nybble_arena_attach": [c_int32, POINTER(c_void_p)],
    "nybble_arena_free": [c_void_p],
    "nybble_arena_add_layer": [
        c_void_p,
        POINTER(c_char_p),
        POINTER(c_int64),
        c_int32,
        POINTER(c_int32),
        POINTER(c_int32),
        POINTER(c_int64),
    ],
    "nybble_arena_fill": [c_void_p, c_int32, c_int32, c_int64, c_void_p, c_int64],
    "nybble_checkpoint_open": [c_char_p, POINTER(c_void_p)],
    "nybble_checkpoint_close": [c_void_p],
    "nybble_arena_fill_tensor": [c_void_p, c_int32, c_int32, c_void_p, c_char_p],
    "nybble_arena_part": [c_void_p, c_int32, c_int32, POINTER(c_void_p), POINTER(c_int64)],
    "nybble_arena_size": [c_void_p, POINTER(c_int32), POINTER(c_int64), POINTER(c_int64)],
    "nybble_arena_require_memory": [c_void_p],
    "nybble_arena_pin": [c_void_p, POINTER(c_int64), POINTER(c_char_p)],
    "nybble_ring_new": [
        c_void_p,
        POINTER(c_int64),
        POINTER(c_void_p),
        c_int32,
        c_int64,
        POINTER(_Options),
        POINTER(c_void_p),
    ],
    "nybble_ring_free": [c_void_p],
    "nybble_ring_acquire": [c_void_p, c_int32, c_int32, c_void_p, c_int64, POINTER(c_int32), POINTER(c_uint64)],
    "nybble_ring_release": [c_void_p, c_int32, c_void_p],
    "nybble_ring_reset": [c_void_p],
    "nybble_ring_copy_stream": [c_void_p, POINTER(c_void_p)],
    "nybble_ring_status": [c_void_p, c_int32, POINTER(_Status)],
    "nybble_ring_get_stats": [c_void_p, POINTER(_Stats)],
}
for _name, _argtypes in _SIGNATURES.items():
    getattr(lib, _name).argtypes = _argtypes
for _name in ("forget_owner", "unregister_slot", "arena_free", "checkpoint_close", "ring_free"):
    getattr(lib, f"nybble_{_name}").restype = None


def _strings(texts: Sequence[str]):
    return (c_char_p * len(texts))(*[text.encode() for text in texts])


def register_owner(name: str, weights: Sequence[str] = ()) -> int:
    """The uid of a new owner; its weight j has uid + j."""
    uid = c_int64()
    check(lib.nybble_register_owner(name.encode(), _strings(weights), len(weights), byref(uid)))
    return uid.value


def register_slot(tensors: Sequence[torch.Tensor]) -> int:
    """A recycled buffer made of the storages' bytes that the tensors cover (each contiguous)."""
    bases = (c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
    sizes = (c_int64 * len(tensors))(*[tensor.numel() * tensor.element_size() for tensor in tensors])
    slot = c_int64()
    check(lib.nybble_register_slot(bases, sizes, len(tensors), byref(slot)))
    return slot.value


def begin_fill(slot: int) -> bool:
    read = c_int32()
    check(lib.nybble_begin_fill(slot, byref(read)))
    return bool(read.value)


def slot_owner(slot: int) -> tuple[int, int, bool]:
    """Owner's uid (-1: nobody), generation, read after release."""
    owner, generation, read = c_int64(), c_uint64(), c_int32()
    check(lib.nybble_slot_owner(slot, byref(owner), byref(generation), byref(read)))
    return owner.value, generation.value, bool(read.value)


def verify_owner(uid: int, pointers: Sequence[int]) -> None:
    """Raises StaleWeightError unless every address lies in a slot that holds weight uid."""
    check(lib.nybble_verify_owner(uid, (c_void_p * len(pointers))(*pointers), len(pointers)))


class Checkpoint:
    """A Hugging Face checkpoint, mapped and validated by the core. ValueError or OSError names the first fault."""

    def __init__(self, path):
        handle = c_void_p()
        check(lib.nybble_checkpoint_open(str(path).encode(), byref(handle)))
        self.handle = handle
        self.close = weakref.finalize(self, lib.nybble_checkpoint_close, handle)


class Arena:
    """The packed base in host memory: one contiguous blob per layer."""

    def __init__(self, handle: c_void_p | None = None, file: int = -1):
        if handle is None:
            handle = c_void_p()
            check(lib.nybble_arena_new(byref(handle)))
        self.handle = handle
        self.file = file  # descriptor of shared memory, owned by the core; -1: private
        self._end = weakref.finalize(self, lib.nybble_arena_free, handle)

    @classmethod
    def shared(cls) -> Arena:
        """In memory that other processes of this host can map, through /proc/<pid>/fd/<file>."""
        handle, file = c_void_p(), c_int32()
        check(lib.nybble_arena_new_shared(byref(handle), byref(file)))
        return cls(handle, file.value)

    @classmethod
    def attach(cls, path: str) -> Arena:
        """The memory of another process's filled arena: the same layers added in the same order are complete."""
        handle = c_void_p()
        check(lib.nybble_arena_attach(os.open(path, os.O_RDWR | os.O_CLOEXEC), byref(handle)))
        return cls(handle)

    def add_layer(self, names: Sequence[str], sizes: Sequence[int]) -> tuple[int, int, list[int]]:
        """Parts of so many bytes. Returns the layer, its layout (equal for same-shaped layers), the parts' offsets."""
        layer, layout, offsets = c_int32(), c_int32(), (c_int64 * len(names))()
        check(
            lib.nybble_arena_add_layer(
                self.handle,
                _strings(names),
                (c_int64 * len(names))(*sizes),
                len(names),
                byref(layer),
                byref(layout),
                offsets,
            )
        )
        return layer.value, layout.value, list(offsets)

    def fill(self, layer: int, part: int, tensor: torch.Tensor) -> None:
        """Copies a CPU tensor's bytes to the start of a part."""
        tensor = tensor.detach().contiguous()
        size = tensor.numel() * tensor.element_size()
        check(lib.nybble_arena_fill(self.handle, layer, part, 0, tensor.data_ptr(), size))

    def fill_tensor(self, layer: int, part: int, checkpoint: Checkpoint, tensor: str) -> None:
        """Copies a whole part from a checkpoint's tensor of as many bytes, from the mapped file, in the core."""
        check(lib.nybble_arena_fill_tensor(self.handle, layer, part, checkpoint.handle, tensor.encode()))

    def part(self, layer: int, part: int) -> torch.Tensor:
        """The part as a uint8 tensor with a storage of its own over the arena's bytes (no copy, keeps the arena)."""
        data, size = c_void_p(), c_int64()
        check(lib.nybble_arena_part(self.handle, layer, part, byref(data), byref(size)))
        buffer = (ctypes.c_uint8 * size.value).from_address(data.value)
        buffer.arena = self
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def require_memory(self) -> None:
        """torch.OutOfMemoryError when host memory does not suffice for all layers. Before the first fill."""
        check(lib.nybble_arena_require_memory(self.handle))

    def pin(self) -> tuple[int, str]:
        """Page-locks the layers for a GPU. Bytes that are locked, and why not all are ("": all). After the last
        fill and before any part() that is kept: layers may move.
        """
        pinned, reason = c_int64(), c_char_p()
        check(lib.nybble_arena_pin(self.handle, byref(pinned), byref(reason)))
        return pinned.value, reason.value.decode()

    def size(self) -> tuple[int, int, int]:
        """Layers, bytes of all of them, bytes of the largest."""
        layers, total, largest = c_int32(), c_int64(), c_int64()
        check(lib.nybble_arena_size(self.handle, byref(layers), byref(total), byref(largest)))
        return layers.value, total.value, largest.value


class Ring:
    """Layers of an arena passing through slots (uint8 tensors). Layer i uses slot i mod len(slots)."""

    def __init__(
        self,
        arena: Arena,
        uids: Sequence[int],
        slots: Sequence[torch.Tensor],
        *,
        prefetch: bool = True,
        poison: bool = False,
        land_at_wait: bool = False,
        delay_us: int = 0,
        chunk_bytes: int = 0,
        observer: Callable[[int, int, int, int], bool] | None = None,
    ):
        """observer(layer, slot, begin, end): called before those bytes of the layer are copied, on the copying thread
        (CUDA: the acquiring one, before they are enqueued; it must not call the ring); True fails the refill there.
        """
        self.slots = list(slots)
        self.arena = arena
        handler = _Observer(lambda _, *where: int(bool(observer(*where)))) if observer else _Observer()
        device = self.slots[0].device
        options = _Options(
            prefetch,
            poison,
            device.type == "cuda",
            device.index or 0,
            land_at_wait,
            delay_us,
            chunk_bytes,
            handler,
            None,
        )
        bases = (c_void_p * len(self.slots))(*[slot.data_ptr() for slot in self.slots])
        handle = c_void_p()
        check(
            lib.nybble_ring_new(
                arena.handle,
                (c_int64 * len(uids))(*uids),
                bases,
                len(self.slots),
                self.slots[0].numel(),
                byref(options),
                byref(handle),
            )
        )
        self.handle = handle
        self._versions = [slot._version for slot in self.slots]
        self._unsettled = False  # an acquire was interrupted between refills and their versions
        self._end = weakref.finalize(self, _free_ring, handle, handler, self.slots, arena)

    def acquire(self, layer: int, order: int, compute_stream: int | None = None) -> None:
        """Returns once what follows reads `layer`. Bumps autograd's version of every slot whose refill it issued.
        Raises what made the refill fail; the slot is then empty and the next acquire tries again. StaleWeightError
        when something else wrote to the slot through a tensor; every slot is then empty.
        """
        if self._unsettled:
            self.reset()
            self._versions = [slot._version for slot in self.slots]
        landed, refilled = c_int32(), c_uint64()
        self._unsettled = True
        try:
            while not landed.value:
                status = lib.nybble_ring_acquire(
                    self.handle, layer, order, compute_stream, _WAIT_MS, byref(landed), byref(refilled)
                )
                if status:
                    check(status)
        finally:
            mask, index = refilled.value, 0
            while mask:
                if mask & 1:
                    torch.autograd.graph.increment_version(self.slots[index])
                    self._versions[index] = self.slots[index]._version
                mask >>= 1
                index += 1
            self._unsettled = False
        index = layer % len(self.slots)
        if self.slots[index]._version != self._versions[index]:
            self._versions[index] = self.slots[index]._version
            self.reset()
            raise StaleWeightError(
                f"slot {index} of layer {layer} was written to by something else (its tensor's version changed); base "
                "weights of a streamed model can't be modified: call nybble.unstream(model) first"
            )

    def release(self, layer: int, compute_stream: int | None = None) -> None:
        status = lib.nybble_ring_release(self.handle, layer, compute_stream)
        if status:
            check(status)

    def reset(self) -> None:
        check(lib.nybble_ring_reset(self.handle))

    def copy_stream(self) -> int | None:
        """The cudaStream_t that refills go through; None on the CPU."""
        stream = c_void_p()
        check(lib.nybble_ring_copy_stream(self.handle, byref(stream)))
        return stream.value

    def status(self, slot: int) -> dict:
        status = _Status()
        check(lib.nybble_ring_status(self.handle, slot, byref(status)))
        return {
            "state": STATES[status.state],
            "layer": status.layer,
            "owner": status.owner,
            "generation": status.generation,
        }

    def stats(self) -> dict[str, int]:
        stats = _Stats()
        check(lib.nybble_ring_get_stats(self.handle, byref(stats)))
        return {name: getattr(stats, name) for name, _ in _Stats._fields_}

    def close(self) -> None:
        """Stops refills and unregisters the slots: a weight still in one has then left the ring."""
        self._end()


def _free_ring(handle, handler, slots, arena) -> None:
    # The arguments outlive the ring: its copy thread calls the handler and writes to the slots until it is freed.
    lib.nybble_ring_free(handle)
