"""Layer size against link rate: where an unsafe op turns wrong, and whether that is where our explanation puts it.

    prediction    wrong exactly when a layer's copy takes longer than the visit that it overlaps with, the backward of
                  the layer above:  bytes / rate > backward visit

A slower link is emulated by copies that begin late. For a given rate the threshold is then a layer size, for a given
size a rate, and both move with the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import nybble
from nybble.gate.equality.gate import EqualityGate
from nybble.gate.race.sizes import WINDOW
from nybble.gate.runner import Outcome, compare
from nybble.gate.training import models
from nybble.gate.training.store import Shape
from nybble.gate.training.timing import synchronize

CLOSE = 1.5  # a copy within this factor of a visit is too close to call: visits spread
RATES = (0.25, 1.0, 4.0)  # of the rate at which the middle size's copy takes one visit


@dataclass(frozen=True)
class Size:
    """One layer size on this machine."""

    layer_bytes: int
    visit_us: float  # of the backward, recompute included
    copy_us: float  # without a delay


@dataclass(frozen=True)
class Point:
    """One (size, rate): how many layers of the unsafe arm were wrong in each repeat. column: of the rate."""

    size: Size
    column: int
    link_gb_s: float
    wrong_layers: tuple[int, ...]

    @property
    def visits(self) -> float:
        """Of a copy at this rate."""
        return 1e-3 * self.size.layer_bytes / self.link_gb_s / self.size.visit_us

    @property
    def predicted(self) -> str:
        return "close" if 1 / CLOSE < self.visits < CLOSE else "wrong" if self.visits > 1 else "right"

    @property
    def seen(self) -> str:
        wrong = [layers > 0 for layers in self.wrong_layers]
        return "wrong" if all(wrong) else "mixed" if any(wrong) else "right"

    def as_data(self) -> dict:
        return {
            "layer_bytes": self.size.layer_bytes,
            "visit_us": round(self.size.visit_us, 1),
            "link_gb_s": float(f"{self.link_gb_s:.4g}"),
            "copy_visits": float(f"{self.visits:.4g}"),
            "predicted": self.predicted,
            "seen": self.seen,
            "wrong_layers": list(self.wrong_layers),
        }


def measured(device: str, shapes: Sequence[Shape], tokens: int, repeats: int, seed: int = 0) -> list[Point]:
    """Every size at every rate. The sizes are measured first: the rates follow from the middle one."""
    gates = [EqualityGate(device, shape, tokens, (), seed) for shape in shapes]
    try:
        sizes = [size_of(gate) for gate in gates]
        middle = sizes[len(sizes) // 2]
        unit = 1e-3 * middle.layer_bytes / middle.visit_us  # GB/s
        points = []
        for gate, size in zip(gates, sizes, strict=True):
            reference = gate.step(gate.resident)
            for column, rate in enumerate(RATES):
                wrong = wrong_at(gate, size, unit * rate, reference, repeats)
                points.append(Point(size, column, attained(size, unit * rate), wrong))
        return points
    finally:
        for gate in gates:
            gate.close()


def size_of(gate: EqualityGate) -> Size:
    """Bytes, visit and copy of the gate's layers."""
    backward = timed_backward(gate)
    model = models.streamed(gate.store, 1, gate.device)
    layer_bytes = nybble.memory_stats(model)["layer_bytes"]
    model._nybble_streamed.close()
    on_cuda = gate.device.type == "cuda"
    host = torch.zeros(layer_bytes, dtype=torch.uint8, pin_memory=on_cuda)
    target = torch.empty_like(host, device=gate.device)
    copy = median_seconds(lambda: target.copy_(host, non_blocking=True), gate.device)
    return Size(layer_bytes, 1e6 * backward / gate.parts, 1e6 * copy)


def timed_backward(gate: EqualityGate) -> float:
    """Seconds of a whole backward of the resident model, recomputation included."""
    begun: list[float] = []

    def begin(_grad: torch.Tensor) -> None:
        synchronize(gate.device)
        begun.append(time.perf_counter())

    def watch(_module, _inputs, output: torch.Tensor) -> None:
        output.register_hook(begin)

    found = []
    for _ in range(4):
        hook = gate.resident.get_base_model().lm_head.register_forward_hook(watch)
        try:
            outcome = gate.step(gate.resident)
        finally:
            hook.remove()
        synchronize(gate.device)
        if outcome.raised is not None:
            raise RuntimeError(f"the resident step ended by {outcome.raised}")
        found.append(time.perf_counter() - begun[-1])
    return statistics.median(found[1:])


def median_seconds(call: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def delay_us(size: Size, link_gb_s: float) -> int:
    """How late a copy must begin to end when a link of this rate would end it."""
    return max(0, round(1e-3 * size.layer_bytes / link_gb_s - size.copy_us))


def attained(size: Size, link_gb_s: float) -> float:
    """The rate that this comes to: no delay makes a link faster than the machine's own."""
    return 1e-3 * size.layer_bytes / (delay_us(size, link_gb_s) + size.copy_us)


def wrong_at(gate: EqualityGate, size: Size, link_gb_s: float, reference: Outcome, repeats: int) -> tuple[int, ...]:
    """Wrong layers of the unsafe arm over such a link, in each repeat."""
    late = delay_us(size, link_gb_s)
    model = models.with_adapters(models.streamed(gate.store, WINDOW, gate.device, delay_us=late))
    try:
        models.set_streamed(model, repaired=False, checked=False)
        return tuple(wrong_layers(gate.step(model), reference, gate.parts) for _ in range(repeats))
    finally:
        models.close(model)


def wrong_layers(got: Outcome, want: Outcome, parts: int) -> int:
    """Layers whose gradients differ; all of them for a step that died."""
    if got.raised is not None:
        return parts
    differences, compared = compare(got.backward, want.backward)
    return sum(d != 0 for d in differences) if compared else parts


def conclusion(points: Sequence[Point]) -> str:
    """Whether the threshold is where the explanation puts it, in words."""
    clear = [p for p in points if p.predicted != "close"]
    against = [p for p in clear if p.seen != p.predicted]
    text = (
        f"{len(clear) - len(against)} of {len(clear)} points as predicted, {len(points) - len(clear)} too close to call"
    )
    if against:
        return f"not confirmed: {text}"
    by_rate, by_size = (moves(clear, key) for key in (lambda p: p.column, lambda p: p.size.layer_bytes))
    if not by_rate or not by_size:
        return f"not shown: {text}, but no threshold was crossed in both directions"
    return f"confirmed: {text}; the threshold size moves with the rate, and the threshold rate with the size"


def moves(points: Sequence[Point], fixed: Callable[[Point], int]) -> bool:
    """Whether, with `fixed` the same, some points are right and some wrong."""
    seen: dict[int, set[str]] = {}
    for p in points:
        seen.setdefault(fixed(p), set()).add(p.seen)
    return any({"right", "wrong"} <= found for found in seen.values())


def lines(points: Sequence[Point]) -> list[str]:
    """The grid as text."""
    found = ["layer size against link rate (emulated by copies that begin late), unsafe arm:"]
    for p in points:
        found.append(
            f"  {p.size.layer_bytes / 2**20:8.2f} MiB at {p.link_gb_s:8.3f} GB/s: a copy takes {p.visits:6.2f} visits "
            f"of {p.size.visit_us:.0f} us: predicted {p.predicted}, seen {p.seen} {list(p.wrong_layers)}"
        )
    return [*found, f"  our explanation of the threshold: {conclusion(points)}"]
