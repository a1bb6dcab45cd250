"""The exact gate: its cells, arms and predictions."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Hashable
from typing import Any

import torch

import nybble
from nybble.gate import room
from nybble.gate.equality.gate import EqualityArm
from nybble.gate.exact import covering
from nybble.gate.exact.cells import LATE_WINDOW, ExactCell, Sizes, batch, cells_of, factors, fits, left_out
from nybble.gate.exact.models import ShapeModels, set_policy
from nybble.gate.runner import Claim, Expectation, Outcome, Role
from nybble.gate.training import models
from nybble.gate.training.outcome import step_outcome
from nybble.gate.training.timing import synchronize


def default_arms() -> list[EqualityArm]:
    control = Role.CONTROL.value
    return [
        EqualityArm("streamed", Role.PRODUCT.value),
        EqualityArm("repair disabled", control, kept=True, checked=False),
        EqualityArm("repair disabled, checked", control, kept=True),
    ]


class ExactGate:
    """See the package docstring. Slots are NaN from issue until their bytes land."""

    name = "exact"
    question = "Are a streamed model's outputs and gradients the resident model's, to the bit, whatever is combined?"
    soundness_only = False

    def __init__(self, device: str, sizes: Sizes, seed: int = 0):
        self.device, self.sizes, self.seed = torch.device(device), sizes, seed
        self.free = room.available(self.device)
        self.arms, self.cells = default_arms(), cells_of(sizes, self.free)
        self.left_out = left_out(sizes, self.free)
        self.now: tuple[str, ShapeModels] | None = None  # one shape at a time is in memory
        self.zero_adapters = False
        self.linears: dict[tuple[str, str], dict[Any, int]] = {}  # by shape and adapters, then by model
        self.refills: dict[str, int] = {}
        self.late_steps: list[tuple[int, float]] = []  # refills and seconds
        self.building_seconds = 0.0

    def close(self) -> None:
        """Ends the streaming."""
        if self.now is not None:
            self.now[1].close()
        self.now = None

    def models_for(self, cell: ExactCell) -> ShapeModels:
        if self.now is None or self.now[0] != cell.shape:
            self.close()
            start = time.perf_counter()
            rings = {window: {"window": window, **self.sizes.ordinary} for window in self.sizes.windows}
            rings["late"] = {"window": LATE_WINDOW, **self.sizes.late}
            self.now = cell.shape, ShapeModels(self.sizes.shapes[cell.shape], rings, self.device, self.seed)
            self.building_seconds += time.perf_counter() - start
        found = self.now[1]
        if found.targets != cell.targets:
            found.adapt(cell.targets)
            self._count_linears(cell, found)
        return found

    def _count_linears(self, cell: ExactCell, found: ShapeModels) -> None:
        counts = {name: len(models.streamed_linears(model)) for name, model in found.streamed.items()}
        counts["resident"] = len(models.switched_linears(found.resident))
        self.linears[cell.shape, cell.targets] = counts
        if self.zero_adapters:
            for model in (found.resident, *found.streamed.values()):
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter.data.zero_()

    def parts_of(self, cell: ExactCell) -> int:
        return self.sizes.shapes[cell.shape].layers

    def ids(self, cell: ExactCell) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + cell.tokens)
        vocab = self.sizes.shapes[cell.shape].vocab
        return torch.randint(0, vocab, batch(cell), generator=generator).to(self.device)

    def runs(self, arm: EqualityArm, cell: ExactCell) -> bool:
        return arm.role == Role.PRODUCT.value or cell.late

    def reference_key(self, arm: EqualityArm, cell: ExactCell) -> Hashable:
        return cell.shape, cell.targets, cell.tokens

    def reference(self, arm: EqualityArm, cell: ExactCell) -> Outcome:
        """The resident model, checkpointed: one reference for every window and policy."""
        found = self.models_for(cell)
        set_policy(found.resident, "recompute")
        return step_outcome(found.resident, self.ids(cell))

    def measure(self, arm: EqualityArm, cell: ExactCell) -> Outcome:
        model = self.models_for(cell).streamed["late" if cell.late else cell.window]
        models.set_streamed(model, arm.mode, repaired=not arm.kept, checked=arm.checked)
        set_policy(model, cell.policy)
        before, start = nybble.memory_stats(model)["refills"], time.perf_counter()
        outcome = step_outcome(model, self.ids(cell))
        refills = nybble.memory_stats(model)["refills"] - before
        self.refills[cell.name] = self.refills.get(cell.name, 0) + refills
        if cell.late:
            synchronize(self.device)
            self.late_steps.append((refills, time.perf_counter() - start))
        return outcome

    def expected(self, arm: EqualityArm, cell: ExactCell) -> Expectation:
        """A kept weight is right in the layers whose slot was not refilled when their backward began: the last ones."""
        if arm.kept:
            return (
                Expectation(stale=True)
                if arm.checked
                else Expectation(wrong=frozenset(range(self.parts_of(cell) - LATE_WINDOW)))
            )
        each = 7 * self.parts_of(cell)
        return Expectation(launches={"forward": each if cell.policy == "keep" else 2 * each, "grad_input": each})

    def claims(self) -> list[Claim]:
        """What the equalities rest on."""
        each = {name: 7 * shape.layers for name, shape in self.sizes.shapes.items()}
        switched = all(count == each[shape] for (shape, _), found in self.linears.items() for count in found.values())
        ran = [dataclasses.asdict(cell) for cell in self.cells if not cell.late]
        covered = set().union(*(covering.pairs_of({k: v for k, v in cell.items() if k != "late"}) for cell in ran))
        wanted = covering.all_pairs(factors(self.sizes), fits(self.sizes, self.free))
        counts = sorted({count for counts in self.linears.values() for count in counts.values()})
        fewest = min(self.refills.values(), default=0)
        found = [
            Claim("every model has 7 linears a layer switched", switched, f"{counts} in {len(self.linears)} sets"),
            Claim(
                "every pair that fits occurs in a cell", wanted <= covered, f"{len(wanted & covered)} of {len(wanted)}"
            ),
            Claim("slots were refilled in every cell", fewest > 0, f"at least {fewest} refills in a cell"),
        ]
        delay = self.sizes.late.get("delay_us", 0) / 1e6
        if delay and self.late_steps:
            late = [seconds / (delay * refills) for refills, seconds in self.late_steps if refills]
            text = f"a step took {min(late):.2f} to {max(late):.2f} times its refills x {1e3 * delay:.0f} ms"
            found.append(Claim("late copies were late", min(late) > 0.8, text))
        return found
