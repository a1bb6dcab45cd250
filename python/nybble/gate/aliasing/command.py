"""Command line of the aliasing gate: `python -m nybble.gate aliasing` and the script in benchmarks/harness."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from nybble.gate import room
from nybble.gate.aliasing.gate import AliasingGate, run_on_one_thread
from nybble.gate.aliasing.sabotage import SABOTAGES
from nybble.gate.aliasing.stacks import Sizes
from nybble.gate.aliasing.table import render
from nybble.gate.aliasing.workers import count_that_fits, default_count, run_shared
from nybble.gate.command import add_device, add_outputs, finish
from nybble.gate.runner import Report

FEW = (2, 3)  # slot counts on a GPU without --full


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the gate. Sizes only change how long it takes: the defect needs no megabytes."""
    add_device(parser)
    parser.add_argument(
        "--slots", type=_counts, metavar="N,N", help="slot counts; 2..5 by default, 2 and 3 on a GPU without --full"
    )
    parser.add_argument("--layers", type=int, help="8 by default, 6 on a GPU; must exceed the largest slot count")
    parser.add_argument("--dim", type=int, default=64, help="in and out features of a weight, a multiple of 64")
    parser.add_argument("--tokens", type=int, default=8, help="rows of x")
    parser.add_argument("--repeats", type=int, help="runs of every arm in every cell; the worst counts")
    parser.add_argument("--backwards", type=int, help="steps of a run, on one ring; the worst counts")
    parser.add_argument("--full", action="store_true", help="five runs of three backwards instead of one of one")
    parser.add_argument("--cells", type=re.compile, metavar="REGEX", help="only the cells whose name it finds")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes that share the cells; up to 8 for --full on a GPU"
    )
    parser.add_argument(
        "--bypass-pool",
        action="store_true",
        help="nothing is recycled: every arm must be exact, else the harness is unsound",
    )
    parser.add_argument("--sabotage", choices=sorted(SABOTAGES), help="plant a fault, to see the gate report it")
    add_outputs(parser)


def run(options: argparse.Namespace) -> int:
    """Runs the gate, prints its report, returns the exit code (runner.Verdict)."""
    gate = make_gate(options)
    left_out = keep_cells(gate, options.cells)
    if slot_counts(options) == FEW and not options.slots:
        left_out["4 and 5 slots"] = "--full, or --slots"
    free = room.available(gate.device)
    gate.cells, cut = room.fitting(gate.cells, gate.need, free)
    left_out |= cut
    wanted = options.workers or default_count(options.device, options.full)
    count = count_that_fits(wanted, max(map(gate.need, gate.cells), default=0), free)
    names = [cell.name for cell in gate.cells]
    report = run_shared(judge, options, gate.cells, count) if count > 1 else judge(options, names)
    report.not_run |= left_out
    report.findings |= {"runs": runs(options), "backwards_of_a_run": gate.backwards, "processes": count}
    return finish(report, options, lines=render(report, gate.cells))


def make_gate(options: argparse.Namespace) -> AliasingGate:
    """The gate that the options ask for, with every cell of its slot counts."""
    layers = options.layers or (6 if options.device == "cuda" else 8)
    sizes = Sizes(layers=layers, dim=options.dim, tokens=options.tokens)
    try:
        gate = AliasingGate(
            device=options.device,
            slots=slot_counts(options),
            sizes=sizes,
            bypass=options.bypass_pool,
            backwards=options.backwards or (3 if options.full else 1),
        )
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from None
    if options.sabotage:
        SABOTAGES[options.sabotage](gate)
    return gate


def slot_counts(options: argparse.Namespace) -> tuple[int, ...]:
    return options.slots or (FEW if options.device == "cuda" and not options.full else (2, 3, 4, 5))


def runs(options: argparse.Namespace) -> int:
    return options.repeats or (5 if options.full else 1)


def judge(options: argparse.Namespace, names: Sequence[str], claims: bool = True) -> Report:
    """The cells of these names; claims: with the reads on purpose as well."""
    gate = make_gate(options)
    gate.cells = [cell for cell in gate.cells if cell.name in names]
    if not claims:
        gate.claims = list
    report = run_on_one_thread(gate, repeats=runs(options))
    report.findings["layer_mib"] = gate.layer_mib()
    return report


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
