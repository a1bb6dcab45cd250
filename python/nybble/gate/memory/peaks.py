"""Bytes that a call holds at its worst, beyond what was there before: by torch's allocator on CUDA, by the kernel's
accounts or by torch's storages on the CPU.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def bytes_of(value: Any) -> int:
    """Of every tensor in a result."""
    return sum(t.numel() * t.element_size() for t in tree_leaves(value) if isinstance(t, torch.Tensor))


def cuda_held(call: Callable[[], Any]) -> int:
    """Requested bytes at the peak, without what the call returns. Exact: torch counts each request before rounding."""
    call()  # handles and workspaces that a first call makes are not its own
    torch.cuda.synchronize()
    gc.collect()
    key = "requested_bytes.all"
    before = torch.cuda.memory_stats()[f"{key}.current"]
    torch.cuda.reset_peak_memory_stats()
    returned = bytes_of(call())
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()[f"{key}.peak"] - before - returned


class ResidentPeak:
    """The process's resident memory, whose high-water mark Linux lets a process reset."""

    _STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def fault(self) -> str | None:
        """Why this machine cannot be asked, or None."""
        try:
            self._reset()
            self._read("VmHWM")
        except (OSError, AttributeError, KeyError) as error:
            return f"the high-water mark of resident memory cannot be reset here ({type(error).__name__}: {error})"
        return None

    def unseen(self) -> int:
        """Bytes that the mark may lack: each CPU keeps up to max(32, 2 x CPUs) pages to itself before Linux adds them
        to the sum that the mark is read from (kernel: lib/percpu_counter.c).
        """
        cpus = os.cpu_count() or 1
        return cpus * max(32, 2 * cpus) * mmap.PAGESIZE

    def held(self, call: Callable[[], Any]) -> int:
        """Bytes at the peak, without what the call returns. Good to a few MiB: heaps keep small blocks."""
        call()
        gc.collect()
        self._reset()
        before = self._read("VmRSS")
        returned = bytes_of(call())
        return max(0, self._read("VmHWM") - before - returned)

    def _reset(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)
        self._CLEAR.write_text("5")

    def _read(self, field: str) -> int:
        rows = dict(line.split(":", 1) for line in self._STATUS.read_text().splitlines())
        return int(rows[field].split()[0]) * 1024


class StorageLedger(TorchDispatchMode):
    """Counts torch storages that ops make inside the block: .peak bytes alive at once. Memory inside of an op is not
    seen. The dead are looked for only when the rest, with them, would be a new peak.
    """

    def __init__(self):
        super().__init__()
        self.entries: dict[int, tuple[StorageWeakRef, int]] = {}  # by address: alive, or dead and not yet noticed
        self.total = 0  # bytes of all entries
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if _counts(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if _counts(leaf):
                self._add(leaf.untyped_storage(), given)
        if self.total > self.peak:
            self.entries = {key: entry for key, entry in self.entries.items() if not entry[0].expired()}
            self.total = sum(size for _, size in self.entries.values())
            self.peak = max(self.peak, self.total)
        return result

    def _add(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        address = storage.data_ptr()
        old = self.entries.get(address)
        if address in given or (old is not None and not old[0].expired()):
            return
        self.total += storage.nbytes() - (old[1] if old is not None else 0)
        self.entries[address] = StorageWeakRef(storage), storage.nbytes()


def _counts(leaf: Any) -> bool:
    strided = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    return strided and leaf.numel() > 0 and leaf.device.type != "meta"


class Account:
    """Bytes of everything that torch made since the block began and that is alive at once: by the allocator on CUDA, by
    storages on the CPU.
    """

    def __init__(self, device: torch.device):
        self.ledger = StorageLedger() if device.type != "cuda" else None
        self.before = 0

    def __enter__(self) -> Account:
        gc.collect()
        if self.ledger is not None:
            self.ledger.__enter__()
        else:
            torch.cuda.synchronize()
            self.before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *error) -> None:
        if self.ledger is not None:
            self.ledger.__exit__(*error)

    def restart(self) -> None:
        """The peak counts from here; what is alive stays in it."""
        gc.collect()
        if self.ledger is not None:
            self.ledger.peak = 0
        else:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        if self.ledger is not None:
            return self.ledger.peak
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self.before


def step_held(call: Callable[[], Any], device: torch.device) -> int:
    """Bytes that torch's tensors of a whole step take at their worst, beyond what was there before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with StorageLedger() as ledger:
        call()
    return ledger.peak
