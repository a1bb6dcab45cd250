"""The aliasing gate: gradients through recycled slots against gradients through private buffers."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Hashable, Sequence

import torch

import nybble
from nybble.gate.aliasing import arms, reads
from nybble.gate.aliasing.arms import AliasingArm, Copies
from nybble.gate.aliasing.cells import Cell, Mode, Stack, all_cells
from nybble.gate.aliasing.layers import Base
from nybble.gate.aliasing.patterns import Keeps, predict
from nybble.gate.aliasing.ring import SlotRing
from nybble.gate.aliasing.stacks import Parameters, Sizes, StreamedModel, make_parameters
from nybble.gate.multiply import moved
from nybble.gate.runner import Claim, Expectation, Outcome, Report, Role, one_thread, run_gate

TENSOR_BYTES = 80  # of a step, its reference's and its own, for each token and feature of a layer


def bitsandbytes_fault() -> str | None:
    """Why bitsandbytes cannot take part, or None."""
    try:
        importlib.import_module("bitsandbytes")
    except Exception as error:  # a broken install fails in many ways; the table says which
        return f"{type(error).__name__}: {error}"
    return None


def default_arms() -> list[AliasingArm]:
    """nybble's op, torch's, bitsandbytes', nybble's kernels in two unsafe shapes, owner checks off and on, and the
    first of them with private copies of some of a layer at one of its two visits.
    """
    absent, on_ctx = bitsandbytes_fault(), Keeps.ALL_ON_CTX

    def copied(name: str, copies: Copies, keeps: Keeps) -> AliasingArm:
        role = Role.CONTROL if keeps is on_ctx else Role.NATIVE
        return AliasingArm(name, role.value, arms.weight_on_ctx, keeps, counted=True, copies=copies)

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
        copied("copy in forward", Copies.FORWARD, Keeps.COPY_ON_CTX),
        copied("copy in recompute", Copies.RECOMPUTE, on_ctx),
        copied("copy, quantised", Copies.QUANTISED, Keeps.COPY_ON_CTX),
        copied("copy, the rest", Copies.REST, on_ctx),
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
        backwards: int = 1,
    ):
        self.device, self.sizes, self.soundness_only = torch.device(device), sizes or Sizes(), bypass
        if self.sizes.layers <= max(slots):
            raise ValueError(
                f"{self.sizes.layers} layers, {max(slots)} slots: expected more layers, else nothing is recycled"
            )
        self.cells = all_cells(slots, bypass=bypass)
        self.arms = list(default_arms() if arms is None else arms)
        self.parts = self.sizes.layers
        self.backwards = backwards  # steps of a run, on one ring
        self._bases: dict[Hashable, Base] = {}
        self._parameters: dict[Stack, Parameters] = {}

    def parts_of(self, cell) -> int:
        return self.parts

    def runs(self, arm: AliasingArm, cell: Cell) -> bool:
        """A reentrant checkpoint recomputes before it reads: nothing can break there, so the controls stay away. A
        layer of the linear stack is its weight, so there is no part of it to copy.
        """
        if arm.copies in (Copies.QUANTISED, Copies.REST) and not cell.is_llama:
            return False
        return cell.mode is not Mode.REENTRANT or (arm.role != Role.CONTROL.value and arm.copies is Copies.NONE)

    def reference_key(self, arm: AliasingArm, cell: Cell) -> Hashable:
        return arm.multiply, cell.stack, cell.mode

    def reference(self, arm: AliasingArm, cell: Cell) -> Outcome:
        """The same op on private buffers."""
        own = dataclasses.replace(arm, checks=False, copies=Copies.NONE)
        return self._run(own, dataclasses.replace(cell, bypass=True), 1)[0]

    def measure(self, arm: AliasingArm, cell: Cell) -> list[Outcome]:
        """One run: as many steps as there are backwards."""
        return self._run(arm, cell, self.backwards)

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
        if arm.keeps.saves_nothing and cell.mode is Mode.EARLY_STOP and cell.stack is not Stack.LLAMA_ALL:
            again = each - 1
        return {"forward": self.parts * (each + again), "grad_input": self.parts * each}

    def claims(self) -> list[Claim]:
        return [] if self.soundness_only else reads.claims(self.device)

    def _run(self, arm: AliasingArm, cell: Cell, steps: int) -> list[Outcome]:
        """Steps on one ring, until one of them dies."""
        ring = SlotRing(self._base(arm, cell), cell, checks=arm.checks)
        parameters = self._parameters_of(cell)
        outcomes: list[Outcome] = []
        try:
            while len(outcomes) < steps and not (outcomes and outcomes[-1].raised):
                outcomes.append(self._step(arm, cell, ring, parameters))
        finally:
            ring.close()
        return outcomes

    def _step(self, arm: AliasingArm, cell: Cell, ring: SlotRing, parameters: Parameters) -> Outcome:
        before = nybble.path_counters() if arm.counted else None
        try:
            step = StreamedModel(cell, self.sizes, ring, arm.multiply, arm.copies).step(parameters)
        except Exception as error:  # an arm that dies is a result: the runner compares it with the prediction
            return Outcome(
                [], [], raised=f"{type(error).__name__}: {error}", stale=isinstance(error, nybble.StaleWeightError)
            )
        gradients = step.gradients
        gradients[0] = {**gradients[0], "input": step.input_gradient}
        launches = None if before is None else moved(before, nybble.path_counters())
        return Outcome([{"y": y} for y in step.outputs], gradients, parameters.must_be_nonzero, launches)

    def _parameters_of(self, cell: Cell) -> Parameters:
        """No step changes them, so every run of a stack has the same."""
        if cell.stack not in self._parameters:
            made = make_parameters(cell, self.sizes, device=self.device, dtype=torch.bfloat16)
            self._parameters[cell.stack] = made
        return self._parameters[cell.stack]

    def need(self, cell: Cell) -> float:
        """Bytes of a cell: every layer in a private dense buffer, as the bf16 reference has them, and one weight while
        it is drawn. What an arm holds is less.
        """
        sizes = [n * k for n, k in self.sizes.weights(cell).values()]
        activations = TENSOR_BYTES * self.parts * self.sizes.tokens * self.sizes.dim
        return 2 * self.parts * sum(sizes) + 12 * max(sizes) + activations

    def layer_mib(self) -> dict[str, float]:
        """Bytes of a packed layer that were streamed, by kind of stack."""
        kinds = {True: "llama", False: "linear"}
        found = {kinds[llama]: base.blob_bytes / 2**20 for (dense, llama), base in self._bases.items() if not dense}
        return {kind: float(f"{mib:.4g}") for kind, mib in found.items()}

    def _base(self, arm: AliasingArm, cell: Cell) -> Base:
        key = arm.dense, cell.is_llama
        if key not in self._bases:
            shapes = self.sizes.weights(cell)
            self._bases[key] = Base(
                shapes,
                self.parts,
                dense=arm.dense,
                device=self.device,
                dtype=torch.bfloat16,
                seed=0,
                vectors=self.sizes.vectors(cell),
            )
        return self._bases[key]


def run_on_one_thread(gate: AliasingGate, *, repeats: int = 1) -> Report:
    """run_gate() with one CPU thread."""
    with one_thread():
        return run_gate(gate, repeats=repeats)
