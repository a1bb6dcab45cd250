"""A plan, as a table and as JSON."""

from __future__ import annotations

import dataclasses

from .machine import Machine
from .memory import Memory
from .planner import Run
from .source import ModelSource
from .speed import Speed

MIB, GIB = 1 << 20, 1 << 30


@dataclasses.dataclass
class Plan:
    """What nybble.plan_training returns. Bytes and seconds; str() is the table, as_dict() the same for programs."""

    source: ModelSource
    run: Run
    machine: Machine
    memory: Memory
    resident: Memory
    speed: Speed
    host_pageable: int
    advice: list[str]

    @property
    def device_bytes(self) -> int:
        """What the run needs of the card at its peak."""
        return self.memory.reserved + self.machine.context_bytes

    @property
    def fits(self) -> bool | None:
        """None: no size of a card was given."""
        return None if self.machine.gpu_bytes is None else self.device_bytes <= self.machine.gpu_bytes

    def as_dict(self) -> dict:
        return as_dict(self)

    def __str__(self) -> str:
        return table(self)


def as_dict(plan: Plan) -> dict:
    """Bytes, seconds, GB/s, TFLOP/s. Keys stay when versions change."""
    step, machine, speed = plan.run.step, plan.machine, plan.speed
    return {
        "model": plan.source.name,
        "model_type": plan.source.config.model_type,
        "layers": len(plan.source.layers),
        "store": plan.source.quantised,
        "run": {
            "tokens": step.tokens,
            "batch": step.rows,
            "rank": step.rank,
            "targets": list(step.targets) or "all-linear",
            "adapter_dtype": str(step.adapter_dtype).removeprefix("torch."),
            "layers_that_keep": step.keep,
            "reentrant": step.reentrant,
            "loss": "chunked" if step.chunked_loss else "whole",
            "window": plan.run.window,
            "optimiser": plan.run.optimiser,
            "accumulate": plan.run.accumulate,
        },
        "device": {
            "lines": plan.memory.lines,
            "allocated": plan.memory.allocated,
            "reserved": plan.memory.reserved,
            "context": machine.context_bytes,
            "context_origin": machine.context_origin,
            "total": plan.device_bytes,
            "available": machine.gpu_bytes,
            "fits": plan.fits,
            "resident_model": plan.resident.reserved + machine.context_bytes,
        },
        "host": {
            "pinned": plan.source.base_bytes,
            "pageable": plan.host_pageable,
            "available": machine.host_bytes,
        },
        "step": {
            "link_bytes": speed.link_bytes,
            "flops": speed.flops,
            "link_s": speed.link_s,
            "compute_s": speed.compute_s,
            "bound": speed.bound,
            "tokens_to_hide": speed.tokens_to_hide,
        },
        "rates": dataclasses.asdict(machine.rates),
        "advice": plan.advice,
    }


def _rows(rows: list[tuple[str, str, str]]) -> list[str]:
    width = max(len(name) for name, *_ in rows)
    return [f"  {name.ljust(width)}  {value:>12}  {note}".rstrip() for name, value, note in rows]


def _mib(count: int) -> str:
    return f"{count / MIB:.1f} MiB"


def _device(plan: Plan) -> list[str]:
    machine = plan.machine
    rows = [(name, _mib(size), "") for name, size in plan.memory.lines.items() if size]
    rest = plan.memory.reserved - plan.memory.allocated
    rows.append(("allocated at the peak", _mib(plan.memory.allocated), "torch.cuda.max_memory_allocated"))
    rows.append(("rounding and gaps of torch's allocator", _mib(rest), ""))
    rows.append(("reserved", _mib(plan.memory.reserved), "torch.cuda.max_memory_reserved"))
    rows.append(("CUDA context and kernels", _mib(machine.context_bytes), machine.context_origin))
    verdict = ""
    if plan.fits is not None:
        verdict = f"{'fits' if plan.fits else 'does NOT fit'} in {machine.gpu_bytes / GIB:.2f} GiB"
    rows.append(("the card needs", _mib(plan.device_bytes), verdict))
    return ["Device memory at the peak of a step:", *_rows(rows)]


def _host(plan: Plan) -> list[str]:
    available = plan.machine.host_bytes
    note = f"{_mib(available)} available" if available is not None else ""
    rows = [
        ("page-locked: the packed base", _mib(plan.source.base_bytes), note),
        ("pageable: largest tensor while loading", _mib(plan.host_pageable), "beside Python and torch themselves"),
    ]
    return ["Host memory:", *_rows(rows)]


def _step(plan: Plan) -> list[str]:
    speed, rates = plan.speed, plan.machine.rates
    link = f"at {rates.link_gb_s:.1f} GB/s ({rates.origin['link_gb_s']})"
    gemm = f"{speed.flops / 1e12:.1f} TFLOP at {rates.gemm_tflops:.0f} TFLOP/s ({rates.origin['gemm_tflops']})"
    rows = [
        ("copies", f"{1e3 * speed.link_s:.1f} ms", f"{speed.link_bytes / 1e9:.2f} GB {link}"),
        ("multiplies", f"{1e3 * speed.compute_s:.1f} ms", gemm),
    ]
    bound = f"  at least the larger: bound by {'the link' if speed.bound == 'link' else 'compute'}"
    return ["A step:", *_rows(rows), f"{bound}; a host that enqueues slowly may take longer than both"]


def table(plan: Plan) -> str:
    """The plan in words, for people."""
    step, source = plan.run.step, plan.source
    kind = "a store" if source.quantised else "sizes as `nybble quantize` would store it"
    head = [
        f"{source.name}: {source.config.model_type}, {len(source.layers)} layers of "
        f"{source.slot_bytes / MIB:.1f} MiB packed ({kind})",
        f"{step.tokens} tokens a batch in {step.rows} row(s), rank {step.rank} on "
        f"{', '.join(step.targets) or 'every projection'}, {plan.run.window} slots, "
        f"{step.keep} of {len(source.layers)} layers keep activations, "
        f"loss {'chunked' if step.chunked_loss else 'whole'}, {plan.run.optimiser}",
    ]
    advice = ["Advice:", *[f"  - {line}" for line in plan.advice]] if plan.advice else []
    return "\n".join([*head, "", *_device(plan), "", *_host(plan), "", *_step(plan), "", *advice])
