"""What this process may still take of a device's memory, and which cells of a gate fit into that."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from nybble.streaming.activations import CudaMeter

MIB = 1 << 20
FIXED_BYTES = 256 * MIB  # workspaces of libraries, and what an allocator cannot give in one piece
MARGIN = 1.1  # of an estimate

Cell = TypeVar("Cell")


def available(device: torch.device) -> int | None:
    """Bytes that torch can still give out: what is free or cached, at most what this process's share of the card leaves
    (torch.cuda.set_per_process_memory_fraction). None on the CPU, whose sizes are small.
    """
    if device.type != "cuda":
        return None
    meter = CudaMeter(device if device.index is not None else torch.device("cuda", torch.cuda.current_device()))
    return max(0, meter.limit() - meter.allocated())


def fits(need: float, free: int | None) -> bool:
    """Whether about `need` bytes fit into `free`; None: everything does."""
    return free is None or need * MARGIN + FIXED_BYTES <= free


def why(need: float, free: int) -> str:
    """The reason why something was left out."""
    return f"needs about {(need * MARGIN + FIXED_BYTES) / MIB:.0f} MiB, {free // MIB} MiB are free"


def fitting(
    cells: Iterable[Cell], need: Callable[[Cell], float], free: int | None
) -> tuple[list[Cell], dict[str, str]]:
    """The cells that fit, and by name why the others do not. need: bytes of a cell, estimated from above."""
    kept, left_out = [], {}
    for cell in cells:
        if fits(need(cell), free):
            kept.append(cell)
        else:
            left_out[cell.name] = why(need(cell), free)
    return kept, left_out
