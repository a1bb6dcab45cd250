"""Command line of the equality gate: `python -m nybble.gate equality`."""

from __future__ import annotations

import argparse

import torch

from nybble.gate import command, room
from nybble.gate.report import shown
from nybble.gate.runner import Report, Result, Role, one_thread, run_gate
from nybble.gate.training.footprint import models_bytes, outcome_bytes, step_bytes
from nybble.gate.training.needs import missing
from nybble.gate.training.store import Shape

QUESTION = "Does a streamed model give the resident model's outputs and gradients?"
OUTCOMES = 6  # that are alive at once: two references of two ways to checkpoint, one more, and the arm's
SHAPES = {
    ("cpu", False): (Shape(64, 128, 4, 2, 1, 64), 6, (2,)),
    ("cpu", True): (Shape(64, 160, 8, 4, 2, 96), 12, (2, 3, 5)),
    ("cuda", False): (Shape(1024, 2816, 6, 8, 4, 1024), 128, (2, 3)),
    ("cuda", True): (Shape(4096, 14336, 6, 32, 8, 4096), 512, (2, 3, 4)),
}


def unrepaired_product(gate) -> None:
    """The product keeps its weight on ctx, and nobody checks owners: exit 1."""
    from nybble.gate.equality.gate import replace_arm

    replace_arm(gate, "streamed", kept=True, checked=False)
    expected = gate.expected
    gate.expected = lambda arm, cell: expected(default_of(arm), cell)


def default_of(arm):
    """The arm of that name as the gate was written."""
    from nybble.gate.equality.gate import default_arms

    return next(own for own in default_arms() if own.name == arm.name)


def repaired_controls(gate) -> None:
    """The controls have been repaired: exit 2."""
    expected = gate.expected
    gate.expected = lambda arm, cell: expected(default_of(arm), cell)
    from nybble.gate.equality.gate import replace_arm

    for arm in gate.arms:
        if arm.role == Role.CONTROL.value:
            replace_arm(gate, arm.name, kept=False, checked=True)


def zero_adapters(gate) -> None:
    """LoRA B is zero, so the gradients of A mean nothing: exit 3."""
    from nybble.gate.equality.gate import zero_adapters as plant

    plant(gate)


def layers_not_switched(gate) -> None:
    """The resident model's linears are bitsandbytes' own, which another path multiplies: exit 3."""
    import bitsandbytes as bnb

    from nybble.gate.training.models import switched_linears

    for module in switched_linears(gate.resident):
        module.__class__ = bnb.nn.Linear4bit


SABOTAGES = {
    "unrepaired-product": unrepaired_product,
    "repaired-controls": repaired_controls,
    "zero-adapters": zero_adapters,
    "layers-not-switched": layers_not_switched,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the gate."""
    command.add_common(parser, SABOTAGES)


def run(options: argparse.Namespace) -> int:
    """Runs the gate, prints its report, returns the exit code (runner.Verdict)."""
    why = missing()
    if why is not None:
        return command.finish(unrun(why), options)
    from nybble.gate.equality.gate import EqualityGate

    shape, tokens, windows, left_out = sizes_that_fit(
        options.device, options.full, room.available(torch.device(options.device))
    )
    if not windows:
        return command.finish(Report("equality", QUESTION, [], left_out), options)
    with one_thread(options.device == "cpu"):
        gate = EqualityGate(options.device, shape, tokens, windows, options.seed)
        try:
            command.sabotage(gate, options.sabotage, SABOTAGES)
            report = run_gate(gate, algorithms="warn")  # of other libraries: A against A judges them
        finally:
            gate.close()
    report.not_run |= other_cards(options.device) | left_out
    return command.finish(report, options, lines=table(report))


def sizes_that_fit(device: str, full: bool, free: int | None):
    """(shape, tokens, windows, what was left out): the largest sizes of which one window fits; no window: none does."""
    left_out: dict[str, str] = {}
    for shape, tokens, windows in dict.fromkeys((SHAPES[device, full], SHAPES[device, False])):
        for count in range(len(windows), 0, -1):
            need = bytes_of(shape, tokens, windows[:count])
            if room.fits(need, free):
                cut = {
                    f"window {window}": room.why(bytes_of(shape, tokens, windows), free) for window in windows[count:]
                }
                return shape, tokens, windows[:count], left_out | cut
        left_out[f"layers of hidden size {shape.hidden}"] = room.why(need, free)
    return shape, tokens, (), left_out


def bytes_of(shape: Shape, tokens: int, windows: tuple[int, ...]) -> float:
    """Of the gate's models, which are all alive, and a step of two sequences."""
    return models_bytes(shape, windows) + step_bytes(shape, 2, tokens) + OUTCOMES * outcome_bytes(shape, 2 * tokens)


def other_cards(device: str) -> dict[str, str]:
    """The verdict is for one card; on this one a streamed NF4 model was seen to differ from the resident one."""
    if device == "cuda" and torch.cuda.get_device_capability() == (12, 0):
        return {}
    return {"sm_120": "this is another card, and the verdict holds for no other"}


def unrun(why: str) -> Report:
    """The report of a gate that this machine cannot run: no verdict."""
    return Report("equality", QUESTION, [], {"all": why})


def table(report: Report) -> list[str]:
    """One line a cell and arm; forward and backward apart."""
    lines = [f"{'cell':<28} {'arm':<26} {'forward':<12} backward"]
    for result in (r for r in report.results if isinstance(r, Result)):
        mark = "" if result.as_expected and not result.faults else " *"
        ahead = "-" if result.raised else f"{len(result.forward_wrong)} of {result.parts}"
        lines.append(f"{result.cell:<28} {result.arm:<26} {ahead:<12} {shown(result)}{mark}")
    lines += [f"{'ok ' if c.holds else 'BAD'} {c.text}: {c.found}" for c in report.claims]
    return [*lines, "forward: layers that differ; backward by layer: X wrong, . right; * not as predicted"]
