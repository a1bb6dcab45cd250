"""The aliasing gate: gradients through recycled slots against gradients through private buffers."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Hashable, Sequence

import torch

import nybble
from nybble.gate.aliasing import arms, reads
from nybble.gate.aliasing.arms import AliasingArm
from nybble.gate.aliasing.cells import Cell, Mode, Stack, all_cells
from nybble.gate.aliasing.layers import Base
from nybble.gate.aliasing.patterns import Keeps, predict
from nybble.gate.aliasing.ring import SlotRing, sleep_cycles_per_ms
from nybble.gate.aliasing.stacks import Sizes, StreamedModel, make_parameters
from nybble.gate.multiply import moved
from nybble.gate.runner import Claim, Expectation, Outcome, Report, Role, one_thread, run_gate


def bitsandbytes_fault() -> str | None:
    """Why bitsandbytes cannot take part, or None."""
    try:
        importlib.import_module("bitsandbytes")
    except Exception as error:  # a broken install fails in many ways; the table says which
        return f"{type(error).__name__}: {error}"
    return None


def default_arms() -> list[AliasingArm]:
    """nybble's op, torch's, bitsandbytes', and nybble's kernels in two unsafe shapes, owner checks off and on."""
    absent = bitsandbytes_fault()
    return [
        AliasingArm("nybble", Role.PRODUCT.value, arms.product, Keeps.SAVED, checks=True, counted=True),
        AliasingArm("bf16", Role.NATIVE.value, arms.native, Keeps.SAVED, dense=True),
        AliasingArm("bitsandbytes", Role.CONTROL.value, arms.bitsandbytes, Keeps.ALL_ON_CTX, not_run=absent),
        AliasingArm("weight on ctx", Role.CONTROL.value, arms.weight_on_ctx, Keeps.ALL_ON_CTX, counted=True),
        AliasingArm("scales on ctx", Role.CONTROL.value, arms.scales_on_ctx, Keeps.SCALES_ON_CTX, counted=True),
        AliasingArm(
            "weight, checked", Role.CONTROL.value, arms.weight_on_ctx, Keeps.ALL_ON_CTX, checks=True, counted=True
        ),
        AliasingArm(
            "scales, checked", Role.CONTROL.value, arms.scales_on_ctx, Keeps.SCALES_ON_CTX, checks=True, counted=True
        ),
    ]


class AliasingGate:
    """See the package docstring. `arms` may be replaced, so that tests can plant a defect."""

    name = "aliasing"
    question = "Do recycled slots give the gradients of private buffers, bit for bit, and is a stale weight an error?"

    def __init__(
        self,
        *,
        device: str = "cpu",
        slots: tuple[int, ...] = (2, 3, 4, 5),
        sizes: Sizes | None = None,
        bypass: bool = False,
        arms: Sequence[AliasingArm] | None = None,
    ):
        self.device, self.sizes, self.soundness_only = torch.device(device), sizes or Sizes(), bypass
        if self.sizes.layers <= max(slots):
            raise ValueError(
                f"{self.sizes.layers} layers, {max(slots)} slots: expected more layers, else nothing is recycled"
            )
        self.cells = all_cells(slots, bypass=bypass)
        self.arms = list(default_arms() if arms is None else arms)
        self.parts = self.sizes.layers
        self.cycles_per_ms = sleep_cycles_per_ms(self.device)
        self.visit_ms = 0.0  # host time of a layer's visit in the last reference: a late copy must take longer
        self._bases: dict[Hashable, Base] = {}

    def runs(self, arm: AliasingArm, cell: Cell) -> bool:
        """A reentrant checkpoint recomputes before it reads: nothing can break there, so the controls stay away."""
        return cell.mode is not Mode.REENTRANT or arm.role != Role.CONTROL.value

    def reference_key(self, arm: AliasingArm, cell: Cell) -> Hashable:
        return arm.multiply, cell.stack, cell.mode

    def reference(self, arm: AliasingArm, cell: Cell) -> Outcome:
        """The same op on private buffers."""
        started = time.perf_counter()
        outcome = self._run(dataclasses.replace(arm, checks=False), dataclasses.replace(cell, bypass=True))
        self.visit_ms = 1e3 * (time.perf_counter() - started) / self.parts
        return outcome

    def measure(self, arm: AliasingArm, cell: Cell) -> Outcome:
        return self._run(arm, cell)

    def expected(self, arm: AliasingArm, cell: Cell) -> Expectation:
        pattern = predict(cell, arm.keeps, self.sizes.layers)
        launches = self.expected_launches(arm, cell) if arm.counted else None
        if arm.checks and pattern.stale:
            return Expectation(stale=True)
        return Expectation(wrong=pattern.wrong, launches=launches)

    def expected_launches(self, arm: AliasingArm, cell: Cell) -> dict[str, int]:
        """Every multiply runs forward, backward, and in the recompute unless early stop ends that sooner."""
        each = len(self.sizes.weights(cell))
        again = each
        if arm.keeps is Keeps.ALL_ON_CTX and cell.mode is Mode.EARLY_STOP and cell.stack is not Stack.LLAMA_ALL:
            again = each - 1
        return {"forward": self.parts * (each + again), "grad_input": self.parts * each}

    def claims(self) -> list[Claim]:
        return [] if self.soundness_only else reads.claims(self.device)

    def _run(self, arm: AliasingArm, cell: Cell) -> Outcome:
        parameters = make_parameters(cell, self.sizes, device=self.device, dtype=torch.bfloat16)
        sleep = int(self.cycles_per_ms * max(10.0, 3 * self.visit_ms))
        ring = SlotRing(self._base(arm, cell), cell, checks=arm.checks, sleep_cycles=sleep)
        before = nybble.path_counters() if arm.counted else None
        try:
            step = StreamedModel(cell, self.sizes, ring, arm.multiply).step(parameters)
        except Exception as error:  # an arm that dies is a result: the runner compares it with the prediction
            return Outcome(
                [], [], raised=f"{type(error).__name__}: {error}", stale=isinstance(error, nybble.StaleWeightError)
            )
        finally:
            ring.close()
        gradients = step.gradients
        gradients[0] = {**gradients[0], "input": step.input_gradient}
        launches = None if before is None else moved(before, nybble.path_counters())
        return Outcome([{"y": y} for y in step.outputs], gradients, parameters.must_be_nonzero, launches)

    def _base(self, arm: AliasingArm, cell: Cell) -> Base:
        key = arm.dense, cell.is_llama
        if key not in self._bases:
            shapes = self.sizes.weights(cell)
            self._bases[key] = Base(
                shapes, self.parts, dense=arm.dense, device=self.device, dtype=torch.bfloat16, seed=0
            )
        return self._bases[key]


def run_on_one_thread(gate: AliasingGate, *, repeats: int = 1) -> Report:
    """run_gate() with one CPU thread."""
    with one_thread():
        return run_gate(gate, repeats=repeats)
