"""The speed gate: arms and checks."""

from __future__ import annotations

import torch

import nybble
from nybble.gate.checks import Check, CheckArm, Judged
from nybble.gate.runner import Report, Role
from nybble.gate.training import models, timed, timing
from nybble.gate.training.timed import TRAINED, Sizes, Timed, TimedGate, TokensCell

NOT_SLOWER = "not slower"
RESIDENT, RESIDENT_DEQUANT, BITSANDBYTES = "resident", "resident, dequant", "resident, bitsandbytes"
STREAMED, STREAMED_DEQUANT = "streamed", "streamed, dequant"
BASE = {RESIDENT: RESIDENT_DEQUANT, STREAMED: STREAMED_DEQUANT}


class SpeedGate(TimedGate):
    """See the package docstring."""

    name = "speed"
    question = "How fast does it train and in how much memory, resident and streamed, and did it train?"
    judged = (*BASE, *BASE.values())

    def __init__(self, device: str, sizes: Sizes, seed: int = 0):
        super().__init__(device, sizes, seed)
        native, control = Role.NATIVE.value, Role.CONTROL.value
        self.arms = [
            CheckArm(RESIDENT, Role.PRODUCT.value, timed.train),
            CheckArm(STREAMED, Role.PRODUCT.value, timed.train),
            CheckArm(RESIDENT_DEQUANT, native, timed.train),
            CheckArm(STREAMED_DEQUANT, native, timed.train),
            CheckArm(BITSANDBYTES, native, timed.train),
            CheckArm("every step twice", control, timed.every_step_twice, must=frozenset({NOT_SLOWER})),
            CheckArm("no gradients", control, timed.without_gradients, must=frozenset({TRAINED})),
        ]
        self.switch = models.Switch()
        base = models.streamed(self.store, sizes.window, self.device, sizes.attention)
        self.streamed = models.with_adapters(base, models.ALL)
        base = models.resident(self.store, self.device, self.switch, sizes.attention)
        self.resident = models.with_adapters(base, models.ALL)

    def close(self) -> None:
        models.close(self.streamed)
        super().close()

    def select(self, arm: CheckArm) -> torch.nn.Module:
        mode = self.mode(arm)
        if arm.name in (STREAMED, STREAMED_DEQUANT):
            models.set_streamed(self.streamed, mode)
            return self.streamed
        self.switch.arm = mode or "bitsandbytes"
        return self.resident

    def linears(self) -> list[torch.nn.Module]:
        return models.switched_linears(self.resident)

    def mode(self, arm: CheckArm) -> str | None:
        return None if arm.name == BITSANDBYTES else "dequant" if arm.name.endswith("dequant") else "auto"

    def judge(self, arm: CheckArm, cell: TokensCell, shared: Timed) -> Judged:
        checks, faults = [self.trained(shared.proofs[arm.name]), *self.launched(arm, cell, shared)], []
        if arm.role != Role.NATIVE.value:
            base = BASE.get(arm.name, RESIDENT_DEQUANT)
            gain = timing.saving(shared.step_seconds(base), shared.step_seconds(arm.name))
            checks.append(Check(NOT_SLOWER, gain.high >= 0, f"saves {gain} of {base}"))
        if arm.role == Role.PRODUCT.value:
            faults = timing.timing_faults(shared.turns.seconds, (arm.name, BASE[arm.name]))
        return Judged(checks, len(shared.turns.seconds[arm.name]), self.values(arm.name, cell, shared), faults)

    def after(self, report: Report) -> None:
        expected = len(self.sizes.shape.projections()) * self.sizes.shape.layers
        counts = len(models.switched_linears(self.resident)), len(models.streamed_linears(self.streamed))
        if counts != (expected, expected):
            report.faults.append(f"{counts} linears switched, expected {expected} in each model")
        report.findings |= {"ceilings": self.ceilings, "streamed": nybble.memory_stats(self.streamed)}
