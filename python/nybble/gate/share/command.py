"""Command line of the share gate: `python -m nybble.gate share`."""

from __future__ import annotations

from nybble.gate.sabotage import cured_controls, faulty_product, nothing_compared
from nybble.gate.training.timed_command import timed_gate

SABOTAGES = {
    "no-backward": faulty_product("no backward"),
    "no-gradients": faulty_product("no gradients"),
    "cured-controls": cured_controls,
    "nothing-compared": nothing_compared,
}


def make(device, sizes, seed):
    """The gate. Needs what training needs."""
    from nybble.gate.share.gate import ShareGate

    return ShareGate(device, sizes, seed)


add_arguments, run = timed_gate("share", make, SABOTAGES)
