"""Command line of the exact gate: `python -m nybble.gate exact`."""

from __future__ import annotations

import argparse

import torch

from nybble.gate import command, room
from nybble.gate.report import shown
from nybble.gate.runner import Report, Result, Role, one_thread, run_gate
from nybble.gate.training.needs import missing
from nybble.gate.training.store import Shape

QUESTION = "Are a streamed model's outputs and gradients the resident model's, to the bit, whatever is combined?"
REPEATS = {False: 2, True: 5}  # without and with --full
LATE_MS = 30  # far above a layer's visit at the shortest length
ON_CPU = {"poison": True, "land_at_wait": True}
ON_CUDA = {"ordinary": {"poison": True, "delay_us": 1000}, "late": {"poison": True, "delay_us": 1000 * LATE_MS}}


def sizes_of(device: str, full: bool):
    """Shapes by name, lengths, windows, and how late copies are."""
    from nybble.gate.exact.cells import Sizes

    if device == "cpu" and not full:
        shapes = {"small": Shape(64, 64, 4, 2, 1, 32), "wide": Shape(64, 128, 4, 2, 1, 32)}
        return Sizes(shapes, (3, 5, 7), (2, 3), ON_CPU, ON_CPU)
    if device == "cpu":
        shapes = {"small": Shape(64, 160, 6, 4, 2, 96), "wide": Shape(128, 320, 6, 4, 2, 96)}
        return Sizes(shapes, (4, 12, 24), (2, 3, 4), ON_CPU, ON_CPU)
    if not full:
        shapes = {"small": Shape(1024, 2816, 6, 8, 4, 1024), "wide": Shape(1024, 4096, 6, 8, 4, 1024)}
        return Sizes(shapes, (64, 128, 512), (2, 3, 4), **ON_CUDA)
    shapes = {"8b": Shape(4096, 14336, 32, 32, 8, 4096), "32b": Shape(5120, 27648, 8, 40, 8, 4096)}
    return Sizes(shapes, (128, 1024, 4096), (2, 3, 4), **ON_CUDA)


def sizes_that_fit(device: str, full: bool, free: int | None):
    """The largest sizes of which a cell with late copies fits, without which there is no control, and what that leaves
    out. None: not even the smallest do.
    """
    from nybble.gate.exact.cells import bytes_of, late_cells

    left_out: dict[str, str] = {}
    for size in dict.fromkeys((full, False)):
        sizes = sizes_of(device, size)
        needs = {cell.shape: bytes_of(cell, sizes) for cell in late_cells(sizes)}
        if any(room.fits(need, free) for need in needs.values()):
            return sizes, left_out
        left_out |= {f"shape {shape}": room.why(need, free) for shape, need in needs.items()}
    return None, left_out


def unrepaired_product(gate) -> None:
    """The product keeps its weight on ctx, and nobody checks owners: exit 1."""
    replace_arms(gate, Role.PRODUCT.value, kept=True, checked=False)


def repaired_controls(gate) -> None:
    """The controls have been repaired: exit 2."""
    replace_arms(gate, Role.CONTROL.value, kept=False, checked=True)


def replace_arms(gate, role: str, **changes) -> None:
    """Other arms of that role, under the predictions of the ones before."""
    import dataclasses

    expected, before = gate.expected, {arm.name: arm for arm in gate.arms}
    gate.arms = [dataclasses.replace(arm, **changes) if arm.role == role else arm for arm in gate.arms]
    gate.expected = lambda arm, cell: expected(before[arm.name], cell)


def zero_adapters(gate) -> None:
    """LoRA B is zero, so the gradients of A mean nothing: exit 3."""
    gate.zero_adapters = True


SABOTAGES = {
    "unrepaired-product": unrepaired_product,
    "repaired-controls": repaired_controls,
    "zero-adapters": zero_adapters,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the gate."""
    command.add_common(parser, SABOTAGES)
    parser.add_argument("--repeats", type=int, help="of every arm in every cell; the worst counts; 2, or 5 with --full")


def run(options: argparse.Namespace) -> int:
    """Runs the gate, prints its report, returns the exit code (runner.Verdict)."""
    why = missing()
    if why is not None:
        return command.finish(Report("exact", QUESTION, [], {"all": why}), options)
    from nybble.gate.exact.gate import ExactGate

    repeats = options.repeats or REPEATS[options.full]
    sizes, left_out = sizes_that_fit(options.device, options.full, room.available(torch.device(options.device)))
    if sizes is None:
        return command.finish(Report("exact", QUESTION, [], left_out), options)
    with one_thread(options.device == "cpu"):
        gate = ExactGate(options.device, sizes, options.seed)
        try:
            command.sabotage(gate, options.sabotage, SABOTAGES)
            report = run_gate(gate, repeats=repeats, algorithms="warn")  # of other libraries: A against A
        finally:
            gate.close()
    report.not_run |= left_out | gate.left_out
    report.findings |= {
        "card": command.card(options.device),
        "repeats": repeats,
        "cells": len(gate.cells),
        "building_seconds": gate.building_seconds,
        "refills": gate.refills,
    }
    return command.finish(report, options, lines=table(report))


def table(report: Report) -> list[str]:
    """One line a cell and arm, with the number of tensors that were compared in each repeat."""
    found, results = report.findings, [r for r in report.results if isinstance(r, Result)]
    width = max([len(r.cell) for r in results], default=4)
    lines = [
        f"on {found['card']}; {found['repeats']} repeats, the worst is shown",
        f"{'cell':<{width}}  {'arm':<26} {'forward':<14} {'backward':<14}",
    ]
    for result in results:
        mark = "" if result.as_expected and not result.faults else " *"
        ahead = "-" if result.raised else f"{result.forward_compared}, {len(result.forward_wrong)} wrong"
        behind = f"{result.backward_compared}, {shown(result)}" if not result.raised else shown(result)
        lines.append(f"{result.cell:<{width}}  {result.arm:<26} {ahead:<14} {behind}{mark}")
    lines += [f"{'ok ' if c.holds else 'BAD'} {c.text}: {c.found}" for c in report.claims]
    return [
        *lines,
        "tensors compared; forward: layers that differ; backward by layer: X wrong, . right; * not predicted",
    ]
