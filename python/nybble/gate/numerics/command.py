"""Command line of the numerics gate: `python -m nybble.gate numerics`."""

from __future__ import annotations

import argparse
import dataclasses

from nybble.gate import command
from nybble.gate.checks import Row, run_checks
from nybble.gate.numerics.gate import NumericsGate, Sizes
from nybble.gate.numerics.measures import sums_in_fp32
from nybble.gate.runner import Report
from nybble.gate.sabotage import cured_controls, faulty_product, nothing_compared

TARGET_SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096), (27648, 5120), (5120, 27648), (28672, 8192), (1024, 4096))
RAGGED = ((1000, 1032), (257, 999))
SIZES = {
    ("cpu", False): Sizes(((192, 128), (65, 99)), (1, 2, 5, 17), largest=24),
    ("cpu", True): Sizes(((512, 384), (384, 512), (65, 99), (257, 131)), (1, 2, 3, 7, 16, 33, 64), 64, 15, None, 400),
    ("cuda", False): Sizes(((4096, 4096), (14336, 4096), *RAGGED), (1, 37, 700, 2048), 2048, 1, 8),
    ("cuda", True): Sizes(
        (*TARGET_SHAPES, *RAGGED), (1, 2, 37, 96, 190, 300, 700, 1200, 2048, 5000, 9000, 16384), 16384, 2, None, 400
    ),
}


def dense_path(gate: NumericsGate) -> None:
    """The product dequantises and says nothing: exit 1."""
    gate.arms[0] = dataclasses.replace(gate.arms[0], act=gate.arms[1].act)


SABOTAGES = {
    "faulty-product": faulty_product("flipped nibble"),
    "dense-path": dense_path,
    "cured-controls": cured_controls,
    "nothing-compared": nothing_compared,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the gate."""
    command.add_common(parser, SABOTAGES)
    parser.add_argument("--shapes", type=shapes, metavar="NxK,...", help="instead of the gate's own")
    parser.add_argument("--largest", type=int, metavar="M", help="tokens, at most")


def shapes(text: str) -> tuple[tuple[int, int], ...]:
    try:
        return tuple((int(n), int(k)) for n, k in (part.split("x") for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected shapes such as 4096x4096,14336x4096") from None


def run(options: argparse.Namespace) -> int:
    """Runs the gate, prints its report, returns the exit code (runner.Verdict)."""
    sizes = SIZES[options.device, options.full]
    sizes = dataclasses.replace(sizes, shapes=options.shapes or sizes.shapes, largest=options.largest or sizes.largest)
    gate = NumericsGate(options.device, sizes, options.seed)
    command.sabotage(gate, options.sabotage, SABOTAGES)
    with sums_in_fp32():
        report = run_checks(gate)
    return command.finish(report, options, lines=table(report))


def table(report: Report) -> list[str]:
    """The product by shape, direction and path."""
    rows = [r for r in report.results if isinstance(r, Row) and r.arm == "auto" and r.values]
    lines = [
        f"{'shape, direction':<28} {'path':<9} {'rows':>4} {'max abs':>9} {'ulp':>5} {'equal':>7} {'error / dense':>14}"
    ]
    groups: dict[tuple[str, str], list[Row]] = {}
    for r in rows:
        groups.setdefault((f"{r.cell.split()[0]} {r.cell.split()[-1]}", r.values["path"]), []).append(r)
    for (where, path), own in groups.items():
        values = [r.values for r in own]
        lines.append(
            f"{where:<28} {path:<9} {len(own):>4} {max(v['max_abs'] for v in values):>9.2g} "
            f"{max(v['max_ulp'] for v in values):>5} {min(v['equal_share'] for v in values):>7.4f} "
            f"{min(v['ratio'] for v in values):>6.3f}-{max(v['ratio'] for v in values):.3f}"
        )
    counts = {where: len(found) for where, found in report.findings.get("boundaries", {}).items()}
    lines.append("dispatch boundaries: " + ", ".join(f"{where} {count}" for where, count in counts.items()))
    rows, wanted = (report.findings.get(key) for key in ("rows", "rows_wanted"))
    lines.append(f"(shape, M, seed) rows: {rows}, at least {wanted} wanted")
    return lines + [f"{'ok ' if c.holds else 'BAD'} {c.text}: {c.found}" for c in report.claims]
