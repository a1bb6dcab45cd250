"""The share gate: arms, checks and the words of its verdict."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nybble.gate.checks import Check, CheckArm, Judged
from nybble.gate.runner import Report, Role
from nybble.gate.training import models, timed, timing
from nybble.gate.training.footprint import PACKED_BYTES
from nybble.gate.training.timed import TRAINED, Sizes, Timed, TimedGate, TokensCell
from nybble.gate.training.timing import Interval

GAIN = "gain"
SMALL_SHARE = 0.02
DEQUANT, FUSED, DENSE = "dequantise + linear", "fused", "dense weight (ablation)"


@dataclass(frozen=True)
class Finding:
    """What a cell says of dequantisation."""

    share: Interval
    gain: Interval
    bytes_share: float  # of the step: what reading packed instead of dense weights may save at the rate of a copy

    @property
    def explained(self) -> bool:
        """The fused arm saves no more than the ablation, within the noise, or the bytes saved explain it."""
        return self.gain.low <= self.share.high or self.gain.low <= self.share.high + self.bytes_share

    @property
    def words(self) -> str:
        text = f"dequantisation takes {self.share} of the step, fused saves {self.gain}"
        if self.share.middle < SMALL_SHARE:
            text += ": not worth it on this card at this size"
        if not self.explained:
            text += ": arms differ in more than the dequantisation"
        elif self.gain.low > self.share.high:
            text += f": more than the ablation; bytes not read are worth up to {self.bytes_share:.1%}"
        return text


class ShareGate(TimedGate):
    """See the package docstring."""

    name = "share"
    question = "How much of a training step is dequantisation on this card, and does the fused multiply save no more?"
    judged = (DEQUANT, FUSED, DENSE)

    def __init__(self, device: str, sizes: Sizes, seed: int = 0):
        super().__init__(device, sizes, seed)
        control = Role.CONTROL.value
        self.arms = [
            CheckArm(FUSED, Role.PRODUCT.value, timed.train),
            CheckArm(DEQUANT, Role.NATIVE.value, timed.train),
            CheckArm(DENSE, Role.NATIVE.value, timed.train),
            CheckArm("no backward", control, timed.without_backward, must=frozenset({GAIN, TRAINED})),
            CheckArm("no gradients", control, timed.without_gradients, must=frozenset({TRAINED})),
        ]
        self.switch = models.Switch()
        base = models.resident(self.store, self.device, self.switch, sizes.attention)
        self.model = models.with_adapters(base, models.ALL)
        self.findings: dict[str, str] = {}

    def select(self, arm: CheckArm) -> torch.nn.Module:
        self.switch.arm = self.mode(arm) or "dense"
        return self.model

    def linears(self) -> list[torch.nn.Module]:
        return models.switched_linears(self.model)

    def mode(self, arm: CheckArm) -> str | None:
        return {DEQUANT: "dequant", DENSE: None}.get(arm.name, "auto")

    def judge(self, arm: CheckArm, cell: TokensCell, shared: Timed) -> Judged:
        checks = [self.trained(shared.proofs[arm.name]), *self.launched(arm, cell, shared)]
        finding = self.finding(arm.name, shared)
        if arm.name not in (DEQUANT, DENSE):
            checks.append(Check(GAIN, finding.explained, finding.words))
        values = self.values(arm.name, cell, shared)
        if arm.name == FUSED:
            self.findings[cell.name] = finding.words
            values |= {"share": finding.share.middle, "gain": finding.gain.middle}
        faults = timing.timing_faults(shared.turns.seconds, self.judged) if arm.name == FUSED else []
        return Judged(checks, len(shared.turns.seconds[arm.name]), values, faults)

    def finding(self, arm: str, shared: Timed) -> Finding:
        base = shared.step_seconds(DEQUANT)
        share = timing.saving(base, shared.step_seconds(DENSE))
        gain = timing.saving(base, shared.step_seconds(arm))
        saved = sum(timed.VISITS.values()) * self.sizes.shape.weights * (2 - PACKED_BYTES)
        rate = 1e9 * self.ceilings.get("device_copy_gb_s", float("inf"))
        return Finding(share, gain, saved / rate / sorted(base)[len(base) // 2])

    def after(self, report: Report) -> None:
        switched = len(models.switched_linears(self.model))
        expected = len(self.sizes.shape.projections()) * self.sizes.shape.layers
        if switched != expected:
            report.faults.append(f"{switched} linears switched, expected {expected}")
        report.findings |= {"words": self.findings, "ceilings": self.ceilings}
