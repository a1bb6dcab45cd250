"""The race gate: the equality gate's arms under copies that are delayed by multiples of a layer's visit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from nybble.gate.equality.gate import EqualityArm, EqualityGate
from nybble.gate.race.grid import wrong_layers
from nybble.gate.race.sizes import WINDOW
from nybble.gate.runner import Claim, Role
from nybble.gate.training import models
from nybble.gate.training.store import Shape
from nybble.gate.training.timing import synchronize

LATE_VISITS = {
    "cpu": 40.0,
    "cuda": 10.0,
}  # delay of the cell in which the unsafe arm must be wrong: far above any visit


@dataclass(frozen=True)
class RaceCell:
    """Copies that begin so many visits late."""

    visits: float
    window: int = WINDOW
    early_stop: bool = True

    @property
    def name(self) -> str:
        return f"copies {self.visits:g} visits late"


@dataclass(frozen=True)
class Point:
    """One delay of the sweep: how many layers' gradients of the unsafe arm were wrong, in each repeat."""

    visits: float
    delay_us: int
    wrong_layers: tuple[int, ...]


class RaceGate(EqualityGate):
    """See the package docstring."""

    name = "race"
    question = "Is an unsafe op wrong exactly when copies are late, and nybble's streaming right at every delay?"

    def __init__(
        self, device: str, shape: Shape, tokens: int, sweep: tuple[float, ...], repeats: int = 3, seed: int = 0
    ):
        super().__init__(device, shape, tokens, (), seed)
        control = Role.CONTROL.value
        self.arms = [
            EqualityArm("streamed", Role.PRODUCT.value),
            EqualityArm("repair disabled", control, kept=True, checked=False),
            EqualityArm("repair disabled, checked", control, kept=True),
        ]
        self.sweep, self.repeats = sweep, repeats
        late = LATE_VISITS[self.device.type]
        self.cells = [RaceCell(late)]
        self.visit_us = self._visit_us()
        self.windows, self.refills = (WINDOW,), {WINDOW: 0}
        self.models = {WINDOW: self._delayed(late)}
        self.points: list[Point] = []
        self.product_differences: list[int] = []

    def _visit_us(self) -> float:
        """Time of a layer's visit in the resident model: forward, recompute and backward make two visits."""
        times = []
        for _ in range(5):
            synchronize(self.device)
            start = time.perf_counter()
            self.step(self.resident)
            synchronize(self.device)
            times.append(time.perf_counter() - start)
        return 1e6 * statistics.median(times[1:]) / (2 * self.parts)

    def _delay_us(self, visits: float) -> int:
        return round(visits * self.visit_us)

    def _delayed(self, visits: float) -> torch.nn.Module:
        """A streamed model whose copies begin late."""
        base = models.streamed(self.store, WINDOW, self.device, delay_us=self._delay_us(visits))
        return models.with_adapters(base)

    def reference_key(self, arm: EqualityArm, cell: RaceCell) -> Hashable:
        return arm.mode

    def ran_apart(self) -> bool:
        """Every arm takes the default multiply."""
        return "dequant" not in self.paths.get("auto", set())

    def measure_sweep(self) -> None:
        """Both arms at every delay, unsafe and safe, against one reference."""
        self.switch.arm = "auto"
        reference = self.step(self.resident)
        for visits in self.sweep:
            model = self._delayed(visits)
            wrong = []
            for _ in range(self.repeats):
                models.set_streamed(model, repaired=False, checked=False)
                wrong.append(wrong_layers(self.step(model), reference, self.parts))
                models.set_streamed(model)
                self.product_differences.append(wrong_layers(self.step(model), reference, self.parts))
            self.points.append(Point(visits, self._delay_us(visits), tuple(wrong)))
            models.close(model)

    def claims(self) -> list[Claim]:
        self.measure_sweep()
        right = not any(self.product_differences) and bool(self.product_differences)
        counted = f"{len(self.product_differences)} steps, {sum(map(bool, self.product_differences))} differ"
        return [*super().claims(), Claim("streamed gradients are exact at every delay of the sweep", right, counted)]

    def threshold(self) -> str:
        """Between which delays the unsafe arm turns wrong, in visits."""
        right = [point.visits for point in self.points if not any(point.wrong_layers)]
        always = [point.visits for point in self.points if all(point.wrong_layers)]
        if not right or not always:
            return "not seen: the unsafe arm was " + ("never right" if not right else "never always wrong")
        return f"right up to {max(right):g} visits, always wrong from {min(always):g}"
