"""A recycled buffer for tests: the storages of one weight, registered with the library's owner table."""

from __future__ import annotations

import contextlib
import ctypes

import torch

from nybble._library import lib
from nybble.errors import check


class Slot:
    """The tensors of a Weight as one slot. fill(uid) is a finished refill, begin_fill() an unfinished one."""

    def __init__(self, tensors):
        self.tensors = list(tensors)
        bases = (ctypes.c_void_p * len(self.tensors))(*[t.data_ptr() for t in self.tensors])
        sizes = (ctypes.c_int64 * len(self.tensors))(*[t.numel() * t.element_size() for t in self.tensors])
        slot = ctypes.c_int64()
        check(lib.nybble_register_slot(bases, sizes, ctypes.c_int32(len(self.tensors)), ctypes.byref(slot)))
        self.id = slot.value

    def begin_fill(self):
        late = ctypes.c_int32()
        check(lib.nybble_begin_fill(ctypes.c_int64(self.id), ctypes.byref(late)))

    def fill(self, uid: torch.Tensor):
        self.begin_fill()
        check(lib.nybble_set_owner(ctypes.c_int64(self.id), ctypes.c_int64(int(uid))))

    def close(self):
        lib.nybble_unregister_slot(ctypes.c_int64(self.id))


def new_uid(name: str) -> torch.Tensor:
    """A uid tensor, as SlotPool hands out: 0-dim int64 on the CPU."""
    uid = ctypes.c_int64()
    check(lib.nybble_register_owner(name.encode(), None, ctypes.c_int32(0), ctypes.byref(uid)))
    return torch.tensor(uid.value, dtype=torch.int64)


@contextlib.contextmanager
def slot_of(weight, uid: torch.Tensor):
    """A slot over a testing Weight's tensors that are not shared tables, holding it."""
    slot = Slot(t for name, t in weight.tensors().items() if name in ("packed", "absmax", "nested_absmax", "offset"))
    slot.fill(uid)
    try:
        yield slot
    finally:
        slot.close()
