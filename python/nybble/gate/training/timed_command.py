"""The command line that `share` and `speed` have in common."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from nybble.gate import command, room
from nybble.gate.checks import Row, run_checks
from nybble.gate.runner import Report
from nybble.gate.training.footprint import models_bytes, step_bytes
from nybble.gate.training.needs import missing
from nybble.gate.training.store import Shape
from nybble.gate.training.timed import Sizes, batch_of

LLAMA_8B_LAYERS = Shape(4096, 14336, 4, 32, 8, 4096)
SMALL_LAYERS = Shape(2048, 5632, 4, 16, 8, 4096)  # where no number of tokens fits with those
LEAST_TOKENS = 2048  # that a larger number is halved down to
SDPA = 0.7  # of what a step with attention written out takes without its scores; a test holds it against records
SIZES = {
    ("cpu", False): Sizes(Shape(64, 128, 2, 2, 1, 64), (16,), 5, 0.02, "eager"),
    ("cpu", True): Sizes(Shape(128, 256, 4, 4, 2, 256), (64, 256), 7, 0.2, "eager"),
    ("cuda", False): Sizes(LLAMA_8B_LAYERS, (1024, 16384), 5, 0.15),
    ("cuda", True): Sizes(LLAMA_8B_LAYERS, (2048, 4096, 8192, 16384), 7, 0.2),
}


def add_timed(parser: argparse.ArgumentParser, sabotages: command.Sabotages) -> None:
    """The options of a timed gate."""
    command.add_common(parser, sabotages)
    parser.add_argument(
        "--tokens", type=lambda text: tuple(map(int, text.split(","))), help="of a step, such as 512,4096"
    )
    parser.add_argument("--rounds", type=int, help="in which every arm runs once")


def timed_gate(name: str, make: Callable[[str, Sizes, int], Any], sabotages: command.Sabotages):
    """(add_arguments, run) of a timed gate. make(device, sizes, seed): the gate; imports what training needs."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Options of the gate."""
        add_timed(parser, sabotages)

    def run(options: argparse.Namespace) -> int:
        """Runs the gate, prints its report, returns the exit code (runner.Verdict)."""
        return run_timed(name, lambda sizes: make(options.device, sizes, options.seed), options, sabotages)

    return add_arguments, run


def run_timed(
    name: str, make: Callable[[Sizes], Any], options: argparse.Namespace, sabotages: command.Sabotages
) -> int:
    """Runs the gate, prints its report, returns the exit code."""
    why = missing()
    if why is not None:
        return command.finish(Report(name, f"the {name} gate", [], {"all": why}), options)
    sizes, left_out = fitting(SIZES[options.device, options.full], options.device)
    if not (options.tokens or sizes.tokens):
        return command.finish(Report(name, f"the {name} gate", [], left_out), options)
    sizes = dataclasses.replace(sizes, tokens=options.tokens or sizes.tokens, rounds=options.rounds or sizes.rounds)
    gate = make(sizes)
    gate.left_out |= left_out
    try:
        command.sabotage(gate, options.sabotage, sabotages)
        report = run_checks(gate)
    finally:
        gate.close()
    report.findings["shape"] = dataclasses.asdict(sizes.shape)
    return command.finish(report, options, lines=table(report))


def fitting(sizes: Sizes, device: str) -> tuple[Sizes, dict[str, str]]:
    """The sizes that fit: numbers of tokens are halved until they do, then layers are smaller; and what that leaves
    out.
    """
    free, left_out = room.available(torch.device(device)), {}
    for shape in dict.fromkeys((sizes.shape, SMALL_LAYERS)):
        tokens = [halved(shape, count, free) for count in sizes.tokens]
        cut = [count for count, kept in zip(sizes.tokens, tokens, strict=True) if kept != count]
        left_out |= {
            f"{count} tokens, hidden size {shape.hidden}": room.why(bytes_of(shape, count), free) for count in cut
        }
        if any(tokens):
            kept = tuple(dict.fromkeys(count for count in tokens if count))
            return dataclasses.replace(sizes, shape=shape, tokens=kept), left_out
    return dataclasses.replace(sizes, tokens=()), left_out


def halved(shape: Shape, tokens: int, free: int | None) -> int:
    """The largest number of tokens that fits, of `tokens` and its halves; 0: none does."""
    while not room.fits(bytes_of(shape, tokens), free):
        if tokens // 2 < LEAST_TOKENS:
            return 0
        tokens //= 2
    return tokens


def bytes_of(shape: Shape, tokens: int) -> float:
    """Of the models of either gate, the ablation's dense weights, and a step with torch's own attention."""
    rows, length = batch_of(tokens)
    step = step_bytes(shape, rows, length) - 10 * rows * shape.heads * length**2
    return models_bytes(shape, (Sizes.window,)) + 2 * shape.weights + SDPA * step


def table(report: Report) -> list[str]:
    """Time and memory of every arm, then the words of the verdict."""
    lines = [f"layers {report.findings['shape']}"]
    heads = f"{'ms/step':>9} {'tok/s':>9} {'spread':>7} {'host':>5} {'peak MiB':>9} {'MHz':>6} {'W':>5} {'mem%':>5}"
    lines.append(f"{'cell':<12} {'arm':<26} {heads}")
    for row in (r for r in report.results if isinstance(r, Row) and r.values):
        v = row.values
        peak = f"{v['peak_bytes'] >> 20}" if "peak_bytes" in v else "-"
        state = [v.get(key) for key in ("clock_mhz", "power_w", "memory_controller_percent")]
        clock, power, memory = ("-" if value is None else f"{value:.0f}" for value in state)
        lines.append(
            f"{row.cell:<12} {row.arm:<26} {v['step_ms']:>9.3f} {v['tokens_per_second']:>9.0f} {v['spread']:>7.1%} "
            f"{v['host_share']:>5.2f} {peak:>9} {clock:>6} {power:>5} {memory:>5}"
        )
    lines += [f"{cell}: {words}" for cell, words in report.findings.get("words", {}).items()]
    roofs = ", ".join(f"{name} {value:.0f}" for name, value in report.findings.get("ceilings", {}).items())
    return lines + ([f"same-session ceilings: {roofs}"] if roofs else [])
