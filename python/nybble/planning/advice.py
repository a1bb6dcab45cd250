"""What to change when a run does not fit, each with what it would need, and whether streaming pays at all."""

from __future__ import annotations

from fractions import Fraction

from . import speed as speeds
from .planner import Planner, Run
from .report import Plan
from .trace import Trace

GIB = 1 << 30
_LEAST_ROW = 16  # tokens


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"


class Lengths:
    """A run's memory at any number of tokens. Sizes are polynomials in the tokens (of degree 1, with eager attention
    2), fitted through traces of the same sequence of events; where that sequence changes, each length is traced.
    """

    def __init__(self, planner: Planner, run: Run):
        self.planner, self.run = planner, run
        step = planner.counted(run)
        degree = 2 if planner.source.eager_attention else 1
        unit = step.rows
        points = [unit * max(1, step.tokens // unit // (1 << i)) for i in range(degree + 1)]
        self._points = points if len(set(points)) == len(points) and not step.chunked_loss else []
        traces = [planner.trace(planner.counted(run.replaced(tokens=point))) for point in self._points]
        if len({len(trace.events) for trace in traces}) != 1:
            self._points = []
        self._traces = traces

    def reserved(self, tokens: int) -> int:
        run = self.run.replaced(tokens=tokens)
        if not self._points:
            return self.planner.memory(run).reserved
        weights = []
        for i, a in enumerate(self._points):
            weight = Fraction(1)
            for j, b in enumerate(self._points):
                weight *= Fraction(tokens - b, a - b) if i != j else 1
            weights.append(weight)
        first = self._traces[0]
        events = [
            (
                rows[0][0],
                -1 if rows[0][1] < 0 else max(0, int(sum(w * row[1] for w, row in zip(weights, rows, strict=True)))),
            )
            for rows in zip(*[trace.events for trace in self._traces], strict=True)
        ]
        played = Trace(events, first.after, first.multiplies, first.kinds, first.resident, first.adapters)
        return self.planner.play(run, played).reserved

    def most(self, room: int) -> int:
        """The most tokens that fit into `room` bytes of torch's memory, no more than the run has; 0: none."""
        rows = self.run.step.rows
        low, high = 0, self.run.step.tokens // rows  # of one row
        unit = max(1, high // 64) if self._points else max(1, high // 16)
        steps_low, steps_high = 0, high // unit
        while steps_low < steps_high:
            middle = (steps_low + steps_high + 1) // 2
            if self.reserved(rows * max(1, middle * unit)) <= room:
                steps_low = middle
            else:
                steps_high = middle - 1
        low = steps_low * unit
        return rows * low if low >= min(_LEAST_ROW, high) else 0


def _changes(run: Run) -> list[tuple[str, Run]]:
    """Single changes in the order in which to try them: what costs least first."""
    changes = []
    if not run.step.chunked_loss:
        changes.append(("loss=chunked (nybble.chunk_loss)", run.replaced(chunked_loss=True)))
    if run.step.keep:
        changes.append(("activations=recompute", run.replaced(keep=0)))
    if run.optimiser == "adamw":
        changes.append(("optimiser=adamw8bit", run.replaced(optimiser="adamw8bit")))
    if run.step.rank > 8:
        changes.append(("rank=8", run.replaced(rank=8)))
    if run.window > 2:
        changes.append(("window=2", run.replaced(window=2)))
    return changes


def _to_fit(plan: Plan, planner: Planner) -> list[str]:
    room = plan.machine.gpu_bytes - plan.machine.context_bytes
    lines = [f"Does not fit: {_gib(plan.device_bytes - plan.machine.gpu_bytes)} too much."]
    together = plan.run
    for name, changed in _changes(plan.run):
        needs = planner.memory(changed).reserved
        lines.append(f"{name} alone: {_gib(needs + plan.machine.context_bytes)}{', fits' if needs <= room else ''}.")
        if "chunked" in name or "recompute" in name:
            together = together.replaced(keep=0, chunked_loss=True)
    most = Lengths(planner, plan.run).most(room)
    lines.append(f"tokens={most} alone fits." if most else "No number of tokens alone makes it fit.")
    if together != plan.run and planner.memory(together).reserved > room:
        most = Lengths(planner, together).most(room)
        lines.append(
            f"loss=chunked, activations=recompute and tokens={most} together fit."
            if most
            else "Nor do loss=chunked and activations=recompute with fewer tokens: what does not stream is too much."
        )
    return lines


def advise(plan: Plan, planner: Planner) -> list[str]:
    """Sentences, the most important first."""
    lines, machine = [], plan.machine
    if plan.fits is False:
        lines += _to_fit(plan, planner)
    whole = plan.resident.reserved + machine.context_bytes
    if machine.gpu_bytes is not None and whole <= machine.gpu_bytes:
        lines.append(f"Streaming does not pay here: the resident model needs {_gib(whole)} and fits; use nybble.patch.")
    elif plan.speed.bound == "link":
        lines.append(
            f"The step waits for the link. From {plan.speed.tokens_to_hide} tokens a batch on the multiplies hide the "
            "copies: a larger batch costs no time up to there; accumulating smaller ones copies the base for each."
        )
    if machine.host_bytes is not None and plan.source.base_bytes > machine.host_bytes:
        lines.append(
            f"Host memory does not suffice: {_gib(plan.source.base_bytes)} for the packed base, "
            f"{_gib(machine.host_bytes)} available."
        )
    dense = max(n * k for layer in plan.source.layers for n, k in layer.values()) * 2
    lines += speeds.remarks(plan.speed, dense)
    if plan.run.step.tokens < 512 and planner.device is None:
        lines.append(
            "With few tokens the multiply has a workspace of up to 32 MiB on the card, which is not counted here."
        )
    config = plan.source.config
    types = getattr(config, "layer_types", None) or ["sliding_attention"]
    window = getattr(config, "sliding_window", None) if "sliding_attention" in types else None
    if window and plan.run.step.tokens // plan.run.step.rows > window:
        lines.append(f"Rows are longer than the sliding window of {window}: masks of row^2 bytes are not counted.")
    return lines
