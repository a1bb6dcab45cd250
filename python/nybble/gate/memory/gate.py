"""The memory gate: cells and checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from nybble.gate import room
from nybble.gate.aliasing import arms as streamed
from nybble.gate.aliasing.cells import Cell as RingCell
from nybble.gate.aliasing.cells import Mode, Ring, Stack
from nybble.gate.aliasing.layers import Base
from nybble.gate.aliasing.ring import SlotRing
from nybble.gate.aliasing.stacks import Sizes as StackSizes
from nybble.gate.aliasing.stacks import StreamedModel, make_parameters
from nybble.gate.checks import Check, CheckArm, CheckGate, Judged
from nybble.gate.dispatch import Plan, plan_of
from nybble.gate.memory import arms
from nybble.gate.memory.arms import FORMULA, HELD, WINDOW, WORKSPACE
from nybble.gate.memory.peaks import ResidentPeak, cuda_held, step_held
from nybble.gate.multiply import FORWARD, GRAD_INPUT, Weight, random_operand, random_weight
from nybble.gate.training.footprint import PACKED_BYTES, layer_bytes, model_bytes, step_bytes
from nybble.gate.training.needs import missing
from nybble.gate.training.store import Shape

MIB = 1 << 20
LARGEST_WORKSPACE = 32 * MIB  # plus a 32nd of dense W, for expanded scales
CPU_PANELS = 32 * MIB  # of dense W that the CPU multiply may hold, all threads together
CONSTANT_OF_A_LAYER = 4  # a streamed peak may exceed its formula by a layer's bytes over this
BYTES_A_WEIGHT = 10  # while it is drawn and quantised, which is more than any arm holds
STEP_RING = RingCell(Stack.LLAMA_QV, Ring.FIXED_PROMPT, Mode.EARLY_STOP, 2)
SLACK = {"cuda": 64 << 10, "cpu": 10 * MIB}  # what the measure itself cannot tell apart


@dataclass(frozen=True)
class Sizes:
    """multiplies: (N, K, M). layers, dim, tokens, windows: of the streamed stack, and of the model."""

    multiplies: Sequence[tuple[int, int, int]]
    layers: Sequence[int]
    dim: int
    tokens: int
    windows: Sequence[int] = (2,)
    model: Shape | None = None  # under nybble.stream, with each of `layers`


@dataclass(frozen=True)
class MultiplyCell:
    """One multiply of one weight."""

    n: int
    k: int
    m: int
    direction: str

    @property
    def name(self) -> str:
        return f"{self.n}x{self.k} M {self.m} {self.direction}"


@dataclass(frozen=True)
class StepCell:
    """One step of a stack of layers over a window of slots."""

    layers: int
    window: int

    @property
    def name(self) -> str:
        return f"{self.layers} layers, window {self.window}"


@dataclass(frozen=True)
class ModelCell:
    """One step of a Llama under nybble.stream."""

    shape: Shape
    window: int

    @property
    def name(self) -> str:
        return f"Llama of {self.shape.layers} layers, window {self.window}"


@dataclass
class Step:
    """What the arms of a step cell share. held: by the reference, beside its weights. workspace: of one multiply."""

    layer_bytes: int
    held: int
    workspace: int
    run: Callable[..., object] = field(repr=False)


class MemoryGate(CheckGate):
    """See the package docstring."""

    name = "memory"
    question = "Does a multiply hold no dense weight, and a streamed step a window of the model instead of all of it?"

    def __init__(self, device: str, sizes: Sizes, seed: int = 0):
        self.device, self.sizes, self.seed = torch.device(device), sizes, seed
        self.multiply_arms, self.step_arms, self.model_arms = arms.multiply_arms(), arms.step_arms(), arms.model_arms()
        self.left_out: dict[str, str] = {}
        self._weights: dict[tuple[int, int], Weight] = {}
        fault = None if device == "cuda" else ResidentPeak().fault()
        if fault:
            self.left_out["peak of one multiply"] = fault
        ways = () if fault else (FORWARD, GRAD_INPUT)
        self.cells = [MultiplyCell(n, k, m, way) for n, k, m in sizes.multiplies for way in ways]
        self.cells += [StepCell(layers, window) for layers in sizes.layers for window in sizes.windows]
        self.cells += self._model_cells()
        self.cells, cut = room.fitting(self.cells, self.need, room.available(self.device))
        self.left_out |= cut

    def need(self, cell) -> float:
        """Bytes of all arms of a cell, of which one runs at a time."""
        if isinstance(cell, MultiplyCell):
            return BYTES_A_WEIGHT * cell.n * cell.k + 4 * cell.m * (cell.n + cell.k) + LARGEST_WORKSPACE
        tokens = self.sizes.tokens
        if isinstance(cell, ModelCell):
            copies = model_bytes(cell.shape, cell.shape.layers) + (cell.window + 1) * layer_bytes(cell.shape)
            return copies + 8 * cell.shape.vocab * cell.shape.hidden + step_bytes(cell.shape, 1, tokens)
        shape = StackSizes(dim=self.sizes.dim).weights(STEP_RING)
        weights, largest = sum(n * k for n, k in shape.values()), max(n * k for n, k in shape.values())
        dense = 2 * weights * cell.layers  # of the reference, which is alive beside the slots; the arms hold less
        step = (60 + 4 * cell.layers) * tokens * self.sizes.dim
        return dense + cell.window * PACKED_BYTES * weights + 12 * largest + step

    def _model_cells(self) -> list[ModelCell]:
        shape = self.sizes.model
        why = missing() if shape is not None else "--device and --full choose sizes without one"
        if why is not None:
            self.left_out["peak of a model under nybble.stream"] = why
            return []
        shapes = [dataclasses.replace(shape, layers=layers) for layers in self.sizes.layers]
        first, *others = self.sizes.windows
        return [ModelCell(own, first) for own in shapes] + [ModelCell(shapes[0], window) for window in others]

    @property
    def arms(self) -> list[CheckArm]:
        return self.multiply_arms + self.step_arms + self.model_arms

    @arms.setter
    def arms(self, arms: Sequence[CheckArm]) -> None:
        first, second = len(self.multiply_arms), len(self.multiply_arms) + len(self.step_arms)
        self.multiply_arms, self.step_arms = list(arms[:first]), list(arms[first:second])
        self.model_arms = list(arms[second:])

    def runs(self, arm: CheckArm, cell) -> bool:
        own = {MultiplyCell: self.multiply_arms, StepCell: self.step_arms, ModelCell: self.model_arms}
        return arm in own[type(cell)]

    def prepare(self, cell):
        if isinstance(cell, MultiplyCell):
            weight = self._weight(cell.n, cell.k)
            columns, _ = weight.columns(cell.direction)
            return (
                weight,
                random_operand(cell.m, columns, self.device, self.seed),
                plan_of(weight, cell.m, cell.direction),
            )
        if isinstance(cell, ModelCell):
            from nybble.gate.memory.model import measured

            return measured(cell.shape, self.sizes.tokens, cell.window, self.device, self.seed)
        return self._step(cell)

    def _weight(self, n: int, k: int) -> Weight:
        if (n, k) not in self._weights:
            self._weights = {(n, k): random_weight(n, k, self.device, self.seed)}
        return self._weights[n, k]

    def judge(self, arm: CheckArm, cell, shared) -> Judged:
        if isinstance(cell, MultiplyCell):
            return self._judge_multiply(arm, cell, *shared)
        if isinstance(cell, ModelCell):
            return self._judge_model(arm, cell, shared)
        held = step_held(lambda: shared.run(arm.act), self.device)
        limit = shared.held + shared.workspace + shared.layer_bytes // 2
        found = (
            f"{held} bytes beside {cell.window} slots of {shared.layer_bytes}, at most {limit}; "
            f"{(held - shared.held) / shared.layer_bytes:.2f} layers more than torch's multiply holds beside the model"
        )
        values = {"held_bytes": held, "reference_bytes": shared.held, "layer_bytes": shared.layer_bytes}
        return Judged([Check(WINDOW, held <= limit, found)], 1, values)

    def _judge_model(self, arm: CheckArm, cell: ModelCell, shared) -> Judged:
        peak, formula = shared.peak(arm.act()), shared.formula(cell.window)
        limit = formula + shared.layer // CONSTANT_OF_A_LAYER
        found = (
            f"peak {peak} bytes; resident {shared.resident_peak} - packed base {shared.base} + {cell.window} layers of "
            f"{shared.layer} = {formula}, {(peak - formula) / shared.layer:+.2f} layers; at most {limit}"
        )
        values = {"peak_bytes": peak, "formula_bytes": formula, "layer_bytes": shared.layer, "base_bytes": shared.base}
        return Judged([Check(FORMULA, peak <= limit, found)], 1, values)

    def _judge_multiply(self, arm: CheckArm, cell: MultiplyCell, weight, operand, plan: Plan) -> Judged:
        def call() -> torch.Tensor:
            return arm.act(cell.direction, operand, weight)

        on_cuda = self.device.type == "cuda"
        held = cuda_held(call) if on_cuda else ResidentPeak().held(call)
        allowed = (plan.workspace_bytes if on_cuda else CPU_PANELS) + SLACK[self.device.type]
        dense = 2 * cell.n * cell.k
        largest = LARGEST_WORKSPACE + dense // 32
        checks = [
            Check(
                HELD, held <= allowed, f"{held} bytes beside operands and result, at most {allowed}; dense W {dense}"
            ),
            Check(WORKSPACE, plan.workspace_bytes <= largest, f"workspace {plan.workspace_bytes}, at most {largest}"),
        ]
        faults = [f"the plan itself dequantises: {plan.text}"] if plan.path == "dequant" else []
        unseen = 0 if on_cuda else ResidentPeak().unseen()
        if dense <= allowed + unseen:
            faults.append(f"dense W has {dense} bytes, which the limit of {allowed} + {unseen} would not show")
        values = {"held_bytes": held, "workspace_bytes": plan.workspace_bytes, "dense_bytes": dense, "path": plan.path}
        return Judged(checks, 1, values, faults)

    def _step(self, cell: StepCell) -> Step:
        """The reference is torch's own multiply on private dense buffers: it cannot copy what the product copies."""
        sizes = StackSizes(layers=cell.layers, dim=self.sizes.dim, tokens=self.sizes.tokens)
        recycled = dataclasses.replace(STEP_RING, slots=cell.window)
        parameters = make_parameters(recycled, sizes, device=self.device, dtype=torch.bfloat16)

        def runner(ring_cell: RingCell, dense: bool) -> tuple[Base, Callable[..., None]]:
            shapes = sizes.weights(ring_cell)
            base = Base(
                shapes,
                cell.layers,
                dense=dense,
                device=self.device,
                dtype=torch.bfloat16,
                seed=self.seed,
                vectors=sizes.vectors(ring_cell),
            )
            ring = SlotRing(base, ring_cell, checks=False)

            def run(multiply) -> None:
                StreamedModel(ring_cell, sizes, ring, multiply).step(parameters)
                for value in (value for layer in parameters.by_layer for value in layer.values()):
                    value.grad = None

            return base, run

        _, reference = runner(dataclasses.replace(recycled, bypass=True), dense=True)
        reference(streamed.native)  # what a first step makes for itself
        held = step_held(lambda: reference(streamed.native), self.device)
        base, run = runner(recycled, dense=False)
        return Step(base.blob_bytes, held, self._workspace(base), run)

    def _workspace(self, base: Base) -> int:
        """The largest that a plan of the stack's multiplies states."""
        weights = [random_weight(n, k, self.device, self.seed) for n, k in set(base.shapes.values())]
        ways = (FORWARD, GRAD_INPUT)
        return max(plan_of(weight, self.sizes.tokens, way).workspace_bytes for weight in weights for way in ways)
