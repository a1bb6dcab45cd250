"""Command line of the determinism gate: `python -m nybble.gate determinism`."""

from __future__ import annotations

import argparse
import dataclasses

from nybble.gate import command
from nybble.gate.checks import run_checks
from nybble.gate.determinism.gate import DeterminismGate, Sizes
from nybble.gate.runner import Report
from nybble.gate.sabotage import cured_controls, faulty_product, nothing_compared

TARGET_SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096), (27648, 5120))
SIZES = {
    ("cpu", False): Sizes(((192, 128),), (1, 4, 9), 20, 12),
    ("cpu", True): Sizes(((512, 384), (65, 99)), (1, 4, 9, 64), 1000, 256),
    ("cuda", False): Sizes(((4096, 4096), (14336, 4096)), (1, 8, 64, 128, 512, 2048), 50, 4096, boundary_count=8),
    ("cuda", True): Sizes(TARGET_SHAPES, (1, 8, 16, 64, 128, 256, 512, 1024, 2048), 1000, 16384),
}

SABOTAGES = {
    "arrival-order": faulty_product("sums in order of arrival"),
    "order-by-rows": faulty_product("order by number of rows"),
    "cured-controls": cured_controls,
    "nothing-compared": nothing_compared,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the gate."""
    command.add_common(parser, SABOTAGES)
    parser.add_argument("--repeats", type=int, help="of every multiply")


def run(options: argparse.Namespace) -> int:
    """Runs the gate, prints its report, returns the exit code (runner.Verdict)."""
    sizes = SIZES[options.device, options.full]
    gate = DeterminismGate(
        options.device, dataclasses.replace(sizes, repeats=options.repeats or sizes.repeats), options.seed
    )
    command.sabotage(gate, options.sabotage, SABOTAGES)
    report = run_checks(gate)
    return command.finish(report, options, lines=table(report))


def table(report: Report) -> list[str]:
    """Per shape and direction: at which M the default plan gives a row the bits that it has alone."""
    lines = ["Default plans, rows among M against the same rows alone (equal bits, or by which path not):"]
    for where, rows in report.findings.get("default_plan_rows_alone", {}).items():
        equal = spans([row for row in rows if not row["differ"]])
        differ = spans([row for row in rows if row["differ"]])
        lines.append(f"  {where:<26} equal at M {equal or 'none'}; other bits at M {differ or 'none'}")
    return lines


def spans(rows: list[dict]) -> str:
    """The M of rows, runs of one path joined."""
    parts: list[tuple[str, list[int]]] = []
    for row in rows:
        if parts and parts[-1][0] == row["path"]:
            parts[-1][1].append(row["m"])
        else:
            parts.append((row["path"], [row["m"]]))
    return ", ".join(
        f"{counts[0]}..{counts[-1]} ({path})" if len(counts) > 1 else f"{counts[0]} ({path})" for path, counts in parts
    )
