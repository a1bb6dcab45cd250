"""Command line of the speed gate: `python -m nybble.gate speed`."""

from __future__ import annotations

import argparse

from nybble.gate.sabotage import cured_controls, faulty_product, nothing_compared
from nybble.gate.training.timed_command import add_timed, run_timed

SABOTAGES = {
    "twice": faulty_product("every step twice"),
    "no-gradients": faulty_product("no gradients"),
    "cured-controls": cured_controls,
    "nothing-compared": nothing_compared,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the gate."""
    add_timed(parser, SABOTAGES)


def run(options: argparse.Namespace) -> int:
    """Runs the gate, prints its report, returns the exit code (runner.Verdict)."""

    def gate(sizes):
        from nybble.gate.speed.gate import SpeedGate

        return SpeedGate(options.device, sizes, options.seed)

    return run_timed("speed", gate, options, SABOTAGES)
