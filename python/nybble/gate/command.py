"""What every gate's command line shares: device, size, sabotage, and where the report goes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from nybble import build_info
from nybble.gate import record, scope
from nybble.gate.report import as_json, verdict_lines
from nybble.gate.runner import Report

Sabotages = Mapping[str, Callable[[Any], None]]


def cuda_is_usable() -> bool:
    """A GPU that torch sees, and a nybble that was built for one."""
    return torch.cuda.is_available() and build_info()["cuda"] is not None


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device: by default a GPU where one can be used."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda_is_usable() else "cpu")


def add_common(parser: argparse.ArgumentParser, sabotages: Sabotages) -> None:
    """The options that most gates have."""
    add_device(parser)
    parser.add_argument("--full", action="store_true", help="the sizes of a record; takes minutes")
    parser.add_argument("--seed", type=int, default=0, help="of weights and activations")
    parser.add_argument("--sabotage", choices=sorted(sabotages), help="plant a fault, to see the gate report it")
    add_outputs(parser)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Where the report goes."""
    parser.add_argument("--json", action="store_true", help="the report as JSON instead of text")
    parser.add_argument("--record", type=Path, metavar="PATH", help="also write PATH.json and PATH.md")
    parser.add_argument("--note", action="append", default=[], help="a sentence for the record, may be repeated")


def finish(report: Report, options: argparse.Namespace, *, lines: Iterable[str] = ()) -> int:
    """Prints the report, writes the record that was asked for, and returns the exit code."""
    lines = list(lines)
    report.findings["card"] = card(options.device)
    if report.results:
        report.not_run |= scope.BEYOND.get(report.gate, {})
    data = as_json(report)
    if options.json:
        print(json.dumps(data, indent=1))
    else:
        print("\n".join([report.question, "", *lines, *([""] if lines else []), *verdict_lines(report)]))
    if options.record is not None:
        text = lines + verdict_lines(report)
        record.write(options.record, data, text=text, notes=options.note, arguments=options.arguments)
    return int(report.verdict)


def sabotage(gate: Any, name: str | None, sabotages: Sabotages) -> None:
    """Plants the fault `name` in a gate; None leaves it alone."""
    if name is not None:
        sabotages[name](gate)


def card(device: str) -> str:
    """The card that a verdict is for."""
    if device == "cpu":
        return "the CPU (no card)"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (sm_{major}{minor})"
