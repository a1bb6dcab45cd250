"""Runs of one model to plan, and what each needs: a step is traced once, then played on the simulated allocator."""

from __future__ import annotations

import dataclasses

import torch

from .memory import CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_BEFORE, Memory, simulate
from .rates import card
from .source import ModelSource
from .trace import Step, Trace, record
from .workspace import multiply_workspace


@dataclasses.dataclass(frozen=True)
class Run:
    """A run to plan. tokens: of one batch. accumulate: batches per step of the optimiser."""

    step: Step
    window: int = 2
    optimiser: str = "adamw"
    accumulate: int = 1

    def replaced(self, **changes) -> Run:
        step = {k: changes.pop(k) for k in list(changes) if k in Step.__dataclass_fields__}
        return dataclasses.replace(self, step=dataclasses.replace(self.step, **step), **changes)


class Planner:
    """One model, any number of runs: what advise() varies."""

    def __init__(self, source: ModelSource):
        self.source = source
        self.device = device = card()
        before = device is not None and torch.cuda.get_device_capability(device)[0] < 9
        self.cublas = CUBLAS_WORKSPACE_BEFORE if before else CUBLAS_WORKSPACE
        self.traces: dict[Step, Trace] = {}

    def trace(self, step: Step) -> Trace:
        if step not in self.traces:
            self.traces[step] = record(self.source, step, multiply_workspace(self.device, self.source.compute_dtype))
        return self.traces[step]

    def counted(self, run: Run) -> Step:
        """The step to trace: with accumulation, one that finds gradients of the batch before."""
        return dataclasses.replace(run.step, holds_gradients=run.accumulate > 1)

    def play(self, run: Run, trace: Trace, resident: bool = False) -> Memory:
        return simulate(
            self.source,
            trace,
            window=run.window,
            tokens=run.step.tokens,
            optimiser=run.optimiser,
            element=run.step.adapter_dtype.itemsize,
            holds_gradients=run.accumulate > 1,
            workspace=self.cublas,
            resident=resident,
        )

    def memory(self, run: Run, resident: bool = False) -> Memory:
        return self.play(run, self.trace(self.counted(run)), resident)
