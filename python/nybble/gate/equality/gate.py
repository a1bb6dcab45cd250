"""The equality gate on one generated Llama: arms, cells and predictions."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

import torch

import nybble
from nybble.gate.runner import Claim, Expectation, Outcome, Role
from nybble.gate.training import models
from nybble.gate.training.outcome import step_outcome
from nybble.gate.training.store import Shape, write_store

LATE = {"poison": True, "land_at_wait": True}  # bytes land when acquire waits for them, NaN before


@dataclass(frozen=True)
class EqualityArm:
    """One way to stream. kept: the weight lies on ctx, the repair is off; checked: owners are verified."""

    name: str
    role: str
    mode: str = "auto"
    kept: bool = False
    checked: bool = True
    not_run: str | None = None


@dataclass(frozen=True)
class EqualityCell:
    """One number of slots under one way to checkpoint."""

    window: int
    early_stop: bool

    @property
    def name(self) -> str:
        return f"window {self.window} | {'early stop' if self.early_stop else 'no early stop'}"


def default_arms() -> list[EqualityArm]:
    control = Role.CONTROL.value
    return [
        EqualityArm("streamed", Role.PRODUCT.value),
        EqualityArm("streamed, dequant", Role.PRODUCT.value, mode="dequant"),
        EqualityArm("repair disabled", control, kept=True, checked=False),
        EqualityArm("repair disabled, dequant", control, mode="dequant", kept=True, checked=False),
        EqualityArm("repair disabled, checked", control, kept=True),
    ]


class EqualityGate:
    """See the package docstring. Copies land at the latest legal moment."""

    name = "equality"
    question = "Does a streamed model give the resident model's outputs and gradients, bit for bit?"
    soundness_only = False

    def __init__(self, device: str, shape: Shape, tokens: int, windows: tuple[int, ...], seed: int = 0):
        self.device, self.shape, self.tokens, self.seed = torch.device(device), shape, tokens, seed
        self.windows = windows
        self.arms = default_arms()
        self.cells = [EqualityCell(window, stop) for window in windows for stop in (True, False)]
        self.parts = shape.layers
        self.folder = tempfile.TemporaryDirectory(prefix="nybble-gate-")
        self.store = write_store(Path(self.folder.name) / "store", shape, self.device, seed)
        self.switch = models.Switch()
        self.resident = models.with_adapters(models.resident(self.store, self.device, self.switch))
        self.models = {window: self._streamed(window) for window in windows}
        self.refills = {window: 0 for window in windows}
        self.paths: dict[str, set[str]] = {}  # that each mode launched

    def _streamed(self, window: int) -> torch.nn.Module:
        base = models.streamed(self.store, window, self.device, **LATE)
        return models.with_adapters(base)

    def close(self) -> None:
        """Ends the streaming and removes the store."""
        for model in self.models.values():
            models.close(model)
        self.folder.cleanup()

    def parts_of(self, cell) -> int:
        return self.parts

    def runs(self, arm: EqualityArm, cell: EqualityCell) -> bool:
        return True

    def reference_key(self, arm: EqualityArm, cell: EqualityCell) -> Hashable:
        return arm.mode, cell.early_stop

    def reference(self, arm: EqualityArm, cell: EqualityCell) -> Outcome:
        """The resident model with the arm's multiply."""
        self.switch.arm = arm.mode
        models.checkpoint(self.resident, cell.early_stop)
        return self.step(self.resident)

    def measure(self, arm: EqualityArm, cell: EqualityCell) -> Outcome:
        model = self.models[cell.window]
        models.set_streamed(model, arm.mode, repaired=not arm.kept, checked=arm.checked)
        models.checkpoint(model, cell.early_stop)
        before = nybble.memory_stats(model)["refills"]
        outcome = self.step(model)
        self.paths.setdefault(arm.mode, set()).update(name.split(".")[0] for name in outcome.launches or {})
        self.refills[cell.window] += nybble.memory_stats(model)["refills"] - before
        return outcome

    def expected(self, arm: EqualityArm, cell: EqualityCell) -> Expectation:
        """A kept weight is right in the layers whose slot was not refilled when their backward began: the last ones."""
        if not arm.kept:
            each = len(self.shape.projections()) * self.parts
            return Expectation(launches={"forward": 2 * each, "grad_input": each})
        if arm.checked:
            return Expectation(stale=True)
        return Expectation(wrong=frozenset(range(self.parts - cell.window)))

    def claims(self) -> list[Claim]:
        """Every linear was switched, and slots were refilled at all."""
        expected = len(self.shape.projections()) * self.parts
        counts = {f"window {w}": len(models.streamed_linears(model)) for w, model in self.models.items()}
        counts["resident"] = len(models.switched_linears(self.resident))
        switched = all(count == expected for count in counts.values())
        return [
            Claim(f"every model has {expected} linears switched", switched, str(counts)),
            Claim("auto and dequant ran different code", self.ran_apart(), str(self.paths)),
            Claim("slots were refilled", all(self.refills.values()), str(self.refills)),
        ]

    def ran_apart(self) -> bool:
        """With auto on the dequant path, one thing would have been compared twice."""
        auto, dequant = self.paths.get("auto", set()), self.paths.get("dequant", set())
        return not {"auto", "dequant"} <= self.paths.keys() or (bool(auto) and not auto & dequant)

    def step(self, model: torch.nn.Module) -> Outcome:
        """One forward and backward on the gate's batch."""
        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(0, self.shape.vocab, (2, self.tokens), generator=generator).to(self.device)
        return step_outcome(model, ids)


def zero_adapters(gate: EqualityGate) -> None:
    """LoRA B is zero in every model: exit 3."""
    for model in (gate.resident, *gate.models.values()):
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.zero_()


def replace_arm(gate: EqualityGate, name: str, **changes) -> None:
    gate.arms = [dataclasses.replace(arm, **changes) if arm.name == name else arm for arm in gate.arms]
