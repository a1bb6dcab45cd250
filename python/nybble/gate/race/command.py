"""Command line of the race gate: `python -m nybble.gate race`."""

from __future__ import annotations

import argparse

import torch

from nybble.gate import command, room
from nybble.gate.equality.command import SABOTAGES, table
from nybble.gate.race.sizes import sizes_that_fit
from nybble.gate.runner import Report, one_thread, run_gate
from nybble.gate.training.needs import missing

QUESTION = "Is an unsafe op wrong exactly when copies are late, and nybble's streaming right at every delay?"


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

    free = room.available(torch.device(options.device))
    (shape, tokens, sweep), shapes, left_out = sizes_that_fit(options.device, options.full, free)
    if shape is None:
        return command.finish(Report("race", QUESTION, [], left_out), options)
    repeats = 5 if options.full else 3
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
        report.not_run["layer size against link rate"] = "--full, or a GPU" if free is None else "too little memory"
    report.not_run |= left_out
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
