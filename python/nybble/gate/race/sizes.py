"""Sizes of the race gate, and which of them fit into what is free."""

from __future__ import annotations

from nybble.gate import room
from nybble.gate.training.footprint import models_bytes, outcome_bytes, step_bytes
from nybble.gate.training.store import Shape

WINDOW = 2  # slots of every streamed model of the gate
SHAPES = {
    ("cpu", False): (Shape(64, 64, 4, 2, 1, 32), 4, (0.0, 0.5, 4.0)),
    ("cpu", True): (Shape(64, 128, 6, 2, 1, 64), 8, (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)),
    ("cuda", False): (Shape(256, 512, 6, 4, 2, 256), 32, (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)),
    ("cuda", True): (
        Shape(1024, 2816, 8, 8, 4, 1024),
        128,
        (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0),
    ),
}
GRIDS = {  # layer sizes that the link rate is swept for
    ("cpu", False): (),
    ("cpu", True): (Shape(64, 64, 4, 2, 1, 32), Shape(128, 128, 4, 2, 1, 32), Shape(256, 256, 4, 2, 1, 32)),
    ("cuda", False): (Shape(256, 512, 6, 4, 2, 256), Shape(512, 1024, 6, 4, 2, 256), Shape(1024, 2048, 6, 8, 4, 256)),
    ("cuda", True): tuple(Shape(128 * size, 384 * size, 6, 4, 2, 256) for size in (2, 4, 8, 16)),
}


def sizes_that_fit(device: str, full: bool, free: int | None):
    """(a row of SHAPES, shapes of the grid, what was left out). The grid's models are alive beside the gate's; its
    largest are left out first. A row of None: none fits.
    """
    left_out: dict[str, str] = {}
    for row, grid in ((SHAPES[device, size], GRIDS[device, size]) for size in dict.fromkeys((full, False))):
        need = bytes_of(*row[:2])
        if not room.fits(need, free):
            left_out[f"layers of hidden size {row[0].hidden}"] = room.why(need, free)
            continue
        for count in range(len(grid), 0, -1):
            beside = need + sum(bytes_of(shape, row[1]) for shape in grid[:count])
            if room.fits(beside, free):
                return row, grid[:count], left_out
            left_out[f"layer size {grid[count - 1].hidden} x {grid[count - 1].ffn}"] = room.why(beside, free)
        return row, (), left_out
    return (None, 0, ()), (), left_out


def bytes_of(shape: Shape, tokens: int) -> float:
    """Of one gate's models (resident, the late one, one of the sweep) and a step of two sequences."""
    outcomes = 3 * outcome_bytes(shape, 2 * tokens)
    return models_bytes(shape, (WINDOW, WINDOW)) + step_bytes(shape, 2, tokens) + outcomes
