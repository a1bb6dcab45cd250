"""Command line of the share gate: `python -m nybble.gate share`."""

from __future__ import annotations

import argparse

from nybble.gate.sabotage import cured_controls, faulty_product, nothing_compared
from nybble.gate.training.timed_command import add_timed, run_timed

SABOTAGES = {
    "no-backward": faulty_product("no backward"),
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
        from nybble.gate.share.gate import ShareGate

        return ShareGate(options.device, sizes, options.seed)

    return run_timed("share", gate, options, SABOTAGES)
