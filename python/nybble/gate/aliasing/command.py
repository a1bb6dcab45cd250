"""Command line of the aliasing gate: `python -m nybble.gate aliasing` and the script in benchmarks/harness."""

from __future__ import annotations

import argparse
import re

from nybble.gate.aliasing.gate import AliasingGate, run_on_one_thread
from nybble.gate.aliasing.sabotage import SABOTAGES
from nybble.gate.aliasing.stacks import Sizes
from nybble.gate.aliasing.table import render
from nybble.gate.command import add_outputs, finish


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the gate. Sizes only change how long it takes: the defect needs no megabytes."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--slots", type=_counts, metavar="N,N", help="slot counts; 2..5 by default, 2 and 3 on a GPU without --full"
    )
    parser.add_argument("--layers", type=int, default=8, help="must exceed the largest slot count")
    parser.add_argument("--dim", type=int, default=64, help="in and out features of a weight, a multiple of 64")
    parser.add_argument("--tokens", type=int, default=8, help="rows of x")
    parser.add_argument("--repeats", type=int, help="runs of every arm in every cell; the worst counts")
    parser.add_argument("--backwards", type=int, help="steps of a run, on one ring; the worst counts")
    parser.add_argument("--full", action="store_true", help="five runs of three backwards instead of one of one")
    parser.add_argument("--cells", type=re.compile, metavar="REGEX", help="only the cells whose name it finds")
    parser.add_argument(
        "--bypass-pool",
        action="store_true",
        help="nothing is recycled: every arm must be exact, else the harness is unsound",
    )
    parser.add_argument("--sabotage", choices=sorted(SABOTAGES), help="plant a fault, to see the gate report it")
    add_outputs(parser)


def run(options: argparse.Namespace) -> int:
    """Runs the gate, prints its report, returns the exit code (runner.Verdict)."""
    few = options.device == "cuda" and not options.full
    slots = options.slots or ((2, 3) if few else (2, 3, 4, 5))
    sizes = Sizes(layers=options.layers, dim=options.dim, tokens=options.tokens)
    try:
        gate = AliasingGate(
            device=options.device,
            slots=slots,
            sizes=sizes,
            bypass=options.bypass_pool,
            backwards=options.backwards or (3 if options.full else 1),
        )
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from None
    left_out = keep_cells(gate, options.cells)
    if few and not options.slots:
        left_out["4 and 5 slots"] = "--full, or --slots"
    if options.sabotage:
        SABOTAGES[options.sabotage](gate)
    repeats = options.repeats or (5 if options.full else 1)
    report = run_on_one_thread(gate, repeats=repeats)
    report.not_run |= left_out
    report.findings |= {"runs": repeats, "backwards_of_a_run": gate.backwards, "layer_mib": gate.layer_mib()}
    return finish(report, options, lines=render(report, gate.cells, gate.parts), parts=gate.parts)


def keep_cells(gate: AliasingGate, wanted: re.Pattern | None) -> dict[str, str]:
    """Drops the other cells; what that leaves out. Nothing left is a bad command line."""
    kept = [cell for cell in gate.cells if wanted is None or wanted.search(cell.name)]
    if not kept:
        raise argparse.ArgumentError(
            None, f"--cells {wanted.pattern}: expected a pattern that finds the name of a cell"
        )
    left_out = len(gate.cells) - len(kept)
    gate.cells = kept
    return {f"{left_out} cells": f"--cells {wanted.pattern}"} if left_out else {}


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
