"""Command line of the aliasing gate: `python -m nybble.gate aliasing` and the script in benchmarks/harness."""

from __future__ import annotations

import argparse

from nybble.gate.aliasing.gate import AliasingGate, run_on_one_thread
from nybble.gate.aliasing.sabotage import SABOTAGES
from nybble.gate.aliasing.stacks import Sizes
from nybble.gate.aliasing.table import render
from nybble.gate.command import add_outputs, finish


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the gate. Sizes only change how long it takes: the defect needs no megabytes."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--slots", type=_counts, default=(2, 3, 4, 5), metavar="N,N", help="slot counts, 2..5 by default"
    )
    parser.add_argument("--layers", type=int, default=8, help="must exceed the largest slot count")
    parser.add_argument("--dim", type=int, default=64, help="in and out features of a weight, a multiple of 64")
    parser.add_argument("--tokens", type=int, default=8, help="rows of x")
    parser.add_argument("--repeats", type=int, help="runs of every arm in every cell; the worst counts")
    parser.add_argument("--full", action="store_true", help="five repeats instead of one")
    parser.add_argument(
        "--bypass-pool",
        action="store_true",
        help="nothing is recycled: every arm must be exact, else the harness is unsound",
    )
    parser.add_argument("--sabotage", choices=sorted(SABOTAGES), help="plant a fault, to see the gate report it")
    add_outputs(parser)


def run(options: argparse.Namespace) -> int:
    """Runs the gate, prints its report, returns the exit code (runner.Verdict)."""
    sizes = Sizes(layers=options.layers, dim=options.dim, tokens=options.tokens)
    try:
        gate = AliasingGate(device=options.device, slots=options.slots, sizes=sizes, bypass=options.bypass_pool)
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from None
    if options.sabotage:
        SABOTAGES[options.sabotage](gate)
    report = run_on_one_thread(gate, repeats=options.repeats or (5 if options.full else 1))
    return finish(report, options, lines=render(report, gate.cells, gate.parts), parts=gate.parts)


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected slot counts such as 2,3") from None
    if not counts or min(counts) < 2:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected counts of at least 2: with one slot the next layer has nowhere to land"
        )
    return counts
