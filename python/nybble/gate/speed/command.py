"""Command line of the speed gate: `python -m nybble.gate speed`."""

from __future__ import annotations

from nybble.gate.sabotage import cured_controls, faulty_product, nothing_compared
from nybble.gate.training.timed_command import timed_gate

SABOTAGES = {
    "twice": faulty_product("every step twice"),
    "no-gradients": faulty_product("no gradients"),
    "cured-controls": cured_controls,
    "nothing-compared": nothing_compared,
}


def make(device, sizes, seed):
    """The gate. Needs what training needs."""
    from nybble.gate.speed.gate import SpeedGate

    return SpeedGate(device, sizes, seed)


add_arguments, run = timed_gate("speed", make, SABOTAGES)
