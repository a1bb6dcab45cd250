"""Counters of the code that really multiplied. They live in C++, beside each launch."""

from __future__ import annotations

from ._library import lib

DIRECTIONS = ("forward", "grad_input")


def path_counters() -> dict[str, dict[str, int]]:
    """Launches since start (or the last reset), per path and direction.

    Returns {path: {"forward": int, "grad_input": int}} for every path of the library: cpu, dequant (dequantise +
    torch's own matmul), row, portable, small_m, hopper. A checkpointed eager step counts two forwards and one
    grad_input per multiply; compiled code may drop the recomputed forward, as its result is not needed.
    """
    counters = {}
    path = 1  # 0 is "none"
    while (name := lib.nybble_path_name(path)) is not None:
        counters[name.decode()] = {direction: lib.nybble_launches(path, i) for i, direction in enumerate(DIRECTIONS)}
        path += 1
    return counters


def reset_path_counters() -> None:
    """Sets every counter to zero."""
    lib.nybble_reset_launches()
