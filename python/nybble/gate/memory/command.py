"""Command line of the memory gate: `python -m nybble.gate memory`."""

from __future__ import annotations

import argparse
import dataclasses

from nybble.gate import command
from nybble.gate.checks import Row, run_checks
from nybble.gate.memory.gate import MIB, MemoryGate, Sizes
from nybble.gate.runner import Report
from nybble.gate.sabotage import nothing_compared
from nybble.gate.training.store import Shape

LARGE = ((8192, 8192, 1), (8192, 8192, 64), (8192, 8192, 512), (14336, 4096, 2048), (28672, 8192, 4096))
SIZES = {
    ("cpu", False): Sizes(((6144, 8192, 2),), (4, 8), dim=128, tokens=4, model=Shape(128, 256, 4, 4, 2, 64)),
    ("cpu", True): Sizes(((6144, 8192, 2), (8192, 8192, 16)), (4, 8, 16), 256, 4, (2, 3), Shape(256, 512, 4, 4, 2, 64)),
    ("cuda", False): Sizes(LARGE[:4], (4, 8), dim=2048, tokens=64, model=Shape(2048, 5632, 4, 16, 4, 4096)),
    ("cuda", True): Sizes(LARGE, (4, 8, 16), 4096, 256, (2, 3, 4), Shape(4096, 14336, 4, 32, 8, 8192)),
}


def dense_product(gate: MemoryGate) -> None:
    """The multiply keeps a dense weight while it runs: exit 1."""
    gate.multiply_arms[0] = dataclasses.replace(gate.multiply_arms[0], act=gate.multiply_arms[1].act)


def copying_product(gate: MemoryGate) -> None:
    """The streamed op copies its weights, whose gradients are right: exit 1."""
    gate.step_arms[0] = dataclasses.replace(gate.step_arms[0], act=gate.step_arms[1].act)


def copying_model(gate: MemoryGate) -> None:
    """The streamed model's linears keep private copies: exit 1."""
    gate.model_arms[0] = dataclasses.replace(gate.model_arms[0], act=gate.model_arms[1].act)


def cured_controls(gate: MemoryGate) -> None:
    """Every control does what the product of its own cells does: exit 2."""
    for name in ("multiply_arms", "step_arms", "model_arms"):
        product, control = getattr(gate, name)
        setattr(gate, name, [product, dataclasses.replace(control, act=product.act)])


SABOTAGES = {
    "dense-product": dense_product,
    "copying-product": copying_product,
    "copying-model": copying_model,
    "cured-controls": cured_controls,
    "nothing-compared": nothing_compared,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the gate."""
    command.add_common(parser, SABOTAGES)


def run(options: argparse.Namespace) -> int:
    """Runs the gate, prints its report, returns the exit code (runner.Verdict)."""
    gate = MemoryGate(options.device, SIZES[options.device, options.full], options.seed)
    command.sabotage(gate, options.sabotage, SABOTAGES)
    report = run_checks(gate)
    return command.finish(report, options, lines=table(report))


def table(report: Report) -> list[str]:
    """Bytes by cell, in MiB."""
    lines = [f"{'cell':<34} {'arm':<24} {'held or peak':>12} {'beside':>48}"]
    for row in (r for r in report.results if isinstance(r, Row) and r.values):
        v = row.values
        if "formula_bytes" in v:
            beside = f"formula {v['formula_bytes'] / MIB:.2f}, a layer {v['layer_bytes'] / MIB:.2f} MiB"
            lines.append(f"{row.cell:<34} {row.arm:<24} {v['peak_bytes'] / MIB:>8.2f} MiB {beside:>48}")
            continue
        if "dense_bytes" in v:
            beside = (
                f"workspace {v['workspace_bytes'] / MIB:.2f}, dense W {v['dense_bytes'] / MIB:.0f} MiB ({v['path']})"
            )
        else:
            beside = f"reference {v['reference_bytes'] / MIB:.2f}, a layer {v['layer_bytes'] / MIB:.2f} MiB"
        lines.append(f"{row.cell:<34} {row.arm:<24} {v['held_bytes'] / MIB:>8.2f} MiB {beside:>48}")
    return lines
