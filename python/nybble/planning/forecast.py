"""nybble.plan_training: memory and bounds of a streamed LoRA run, before it runs."""

from __future__ import annotations

import os

from . import source as sources
from . import speed as speeds
from .advice import advise
from .choices import DTYPES, OPTIMISERS
from .machine import machine_of
from .planner import Planner, Run
from .report import Plan
from .trace import Step


def _keep(activations: str | int, layers: int) -> int:
    if activations in ("recompute", "keep"):
        return layers if activations == "keep" else 0
    count = int(activations) if str(activations).isdigit() else -1
    if not 0 <= count <= layers:
        raise ValueError(
            f'activations is {activations!r}, expected "recompute", "keep", or how many of {layers} layers keep'
        )
    return count


def _positive(**numbers: int) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value}, expected a whole number from 1 on")


def plan_training(
    model: str | os.PathLike,
    *,
    gpu_memory: str | int | None = None,
    tokens: int = 4096,
    batch: int = 1,
    rank: int = 16,
    targets: str = "all-linear",
    window: int = 2,
    activations: str | int = "recompute",
    reentrant: bool = False,
    loss: str = "whole",
    adapter_dtype: str = "bfloat16",
    optimiser: str = "adamw",
    accumulate: int = 1,
    host_memory: str | int | None = None,
    context: str | int | None = None,
    link_gb_s: float | None = None,
    gemm_tflops: float | None = None,
    memory_gb_s: float | None = None,
) -> Plan:
    """What a streamed LoRA run of `model` needs and what bounds it, from its config and file headers alone.

    model: a store, or a Hugging Face folder with config.json, whose layers then count as `nybble quantize` would store
    them. tokens: of one batch of `batch` rows, without padding (a padded batch builds masks on top). rank, targets
    (projection names with commas, or all-linear), adapter_dtype: the LoRA adapters. activations: "recompute", "keep",
    or how many of the last layers keep. loss: "whole" (transformers') or "chunked" (nybble.chunk_loss). optimiser:
    adamw (fused), adamw8bit or sgd; accumulate: batches per step. gpu_memory, host_memory, context (of CUDA, outside
    torch's allocator): sizes such as "8GiB"; by default what this machine has. Rates: measured on this machine's card,
    else assumed. Raises FileNotFoundError and ValueError.
    """
    _positive(tokens=tokens, batch=batch, rank=rank, window=window, accumulate=accumulate)
    if tokens % batch:
        raise ValueError(f"tokens is {tokens}, expected a multiple of batch, {batch}: rows of equal length")
    for name, value, known in (
        ("loss", loss, ("whole", "chunked")),
        ("optimiser", optimiser, OPTIMISERS),
        ("adapter_dtype", adapter_dtype, tuple(DTYPES)),
    ):
        if value not in known:
            raise ValueError(f"{name} is {value!r}, expected one of {', '.join(known)}")
    source = sources.read(model)
    names = () if targets == "all-linear" else tuple(sorted(targets.split(",")))
    keep = _keep(activations, len(source.layers))
    step = Step(tokens, batch, rank, names, DTYPES[adapter_dtype], keep, reentrant, loss == "chunked")
    run = Run(step, window, optimiser, accumulate)
    planner = Planner(source)
    memory, resident = planner.memory(run), planner.memory(run, resident=True)
    shape = max((shape for layer in source.layers for shape in layer.values()), key=lambda s: s[0] * s[1])
    given = {"link_gb_s": link_gb_s, "gemm_tflops": gemm_tflops, "memory_gb_s": memory_gb_s}
    machine = machine_of(gpu_memory, host_memory, context, given, tokens, shape)
    speed = speeds.forecast(source, step, window, accumulate, machine.rates)
    pageable = max(size for _, size in planner.trace(planner.counted(run)).resident)
    plan = Plan(source, run, machine, memory, resident, speed, pageable, [])
    plan.advice = advise(plan, planner)
    return plan
