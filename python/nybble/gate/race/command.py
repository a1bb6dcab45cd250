"""Command line of the race gate: `python -m nybble.gate race`."""

from __future__ import annotations

import argparse

from nybble.gate import command
from nybble.gate.equality.command import SABOTAGES, table
from nybble.gate.runner import Report, one_thread, run_gate
from nybble.gate.training.needs import missing
from nybble.gate.training.store import Shape

QUESTION = "Is an unsafe op wrong exactly when copies are late, and nybble's streaming right at every delay?"
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the gate."""
    command.add_common(parser, SABOTAGES)


def run(options: argparse.Namespace) -> int:
    """Runs the gate, prints its report, returns the exit code (runner.Verdict)."""
    why = missing()
    if why is not None:
        return command.finish(Report("race", QUESTION, [], {"all": why}), options)
    from nybble.gate.race import grid
    from nybble.gate.race.gate import RaceGate

    shape, tokens, sweep = SHAPES[options.device, options.full]
    shapes, repeats = GRIDS[options.device, options.full], 5 if options.full else 3
    with one_thread(options.device == "cpu"):
        gate = RaceGate(options.device, shape, tokens, sweep, repeats=repeats, seed=options.seed)
        try:
            command.sabotage(gate, options.sabotage, SABOTAGES)
            report = run_gate(gate, algorithms="warn")
            points = grid.measured(options.device, shapes, tokens, repeats, options.seed) if shapes else []
        finally:
            gate.close()
    report.findings |= {
        "visit_us": gate.visit_us,
        "sweep": [{"visits": p.visits, "delay_us": p.delay_us, "wrong_layers": p.wrong_layers} for p in gate.points],
        "threshold": gate.threshold(),
    }
    lines = table(report) + sweep_lines(report, gate.parts)
    if points:
        report.findings["size_against_rate"] = [point.as_data() for point in points]
        report.findings["explanation"] = grid.conclusion(points)
        lines += grid.lines(points)
    else:
        report.not_run["layer size against link rate"] = "--full, or a GPU"
    report.not_run["a link that is slow by itself"] = "a slower link is emulated by copies that begin late"
    return command.finish(report, options, lines=lines)


def sweep_lines(report: Report, parts: int) -> list[str]:
    """The unsafe arm by delay."""
    visit = f"{report.findings['visit_us']:.0f} us"
    lines = [f"a layer's visit takes {visit}; wrong layers of {parts} in each repeat of the unsafe arm:"]
    for point in report.findings["sweep"]:
        lines.append(
            f"  copies {point['visits']:g} visits late ({point['delay_us']} us): {list(point['wrong_layers'])}"
        )
    return [*lines, f"  threshold: {report.findings['threshold']}"]
