"""Peak device memory of a training run: a traced step, played three times on a simulated allocator."""

from __future__ import annotations

import dataclasses

from .allocator import ROUND, Allocator
from .source import ModelSource
from .trace import ACTIVATIONS, GRADIENTS, LOSS, WORKING, Trace

CUBLAS_WORKSPACE = 32 << 20  # per thread that multiplies, on sm_90 and later
CUBLAS_WORKSPACE_BEFORE = 8519680  # 4096 KiB twice, 16 KiB eight times: torch's default elsewhere
_EIGHT_BIT_FROM = 4096  # elements; smaller tensors have states in float32
STEPS = 3


@dataclasses.dataclass
class Memory:
    """Bytes. lines: what is allocated at the peak, by what it is; they sum to `allocated`."""

    lines: dict[str, int]
    allocated: int
    reserved: int


def _rounded(size: int) -> int:
    return max(ROUND, -(-size // ROUND) * ROUND)


def _states(trace: Trace, optimiser: str, element: int) -> list[int]:
    """Sizes of the optimiser's tensors. element: bytes of an adapter's."""
    if optimiser == "adamw":
        return [size for _, numel in trace.adapters for size in (numel, numel, 4)]
    if optimiser == "adamw8bit":
        sizes = []
        for _, size in trace.adapters:
            numel = size // element
            small = numel < _EIGHT_BIT_FROM
            sizes += [4 * numel] * 2 if small else [numel, numel, 4 * -(-numel // 256), 4 * -(-numel // 256)]
        return sizes
    return []


class _Run:
    """Static allocations by line, then steps. Keys of statics are negative, those of step s are offset by it."""

    def __init__(self, trace: Trace):
        self.trace, self.allocator = trace, Allocator()
        self.lines: dict[str, int] = {}
        self._static = 0
        self._live: dict[int, int] = {}  # key in the trace -> bytes
        self.peak: tuple[int, dict[str, int]] = (0, {})

    def hold(self, line: str, *sizes: int) -> None:
        self.lines.setdefault(line, 0)
        for size in sizes:
            self._static -= 1
            self.allocator.allocate(self._static, size)
            self.lines[line] += _rounded(size) if size else 0

    def play(self, events: list[tuple[int, int]]) -> None:
        allocator, live = self.allocator, self._live
        for key, size in events:
            if size < 0:
                allocator.release(key)
                live.pop(key, None)
                continue
            allocator.allocate(key, size)
            live[key] = size
            if allocator.allocated > self.peak[0]:
                self.peak = allocator.allocated, dict(live)

    def memory(self) -> Memory:
        allocated, live = self.peak
        found = dict(self.lines)
        for kind in (ACTIVATIONS, LOSS, WORKING, GRADIENTS):
            sizes = [_rounded(size) for key, size in live.items() if self.trace.kinds[key] == kind and size]
            found[kind] = found.get(kind, 0) + sum(sizes)
        found[WORKING] += allocated - sum(found.values())  # rests that the allocator does not split off
        return Memory(found, allocated, self.allocator.peak_reserved)


def _line_of(name: str, tied: bool) -> str:
    if "embed_tokens" in name:
        return "embedding, which is the head too" if tied else "embedding"
    return "head" if "lm_head" in name else "norms and biases"


def simulate(
    source: ModelSource,
    trace: Trace,
    *,
    window: int,
    tokens: int,
    optimiser: str = "adamw",
    element: int = 2,
    holds_gradients: bool = False,
    workspace: int = CUBLAS_WORKSPACE,
    resident: bool = False,
) -> Memory:
    """What the run allocates and makes torch reserve. resident: every layer on the device instead of `window` slots."""
    run = _Run(trace)
    if resident:
        run.hold("packed base", *source.layer_bytes)
    else:
        run.hold("slots", *[source.slot_bytes] * min(window, len(source.layers)))
    tied = not any("lm_head" in name for name, _ in trace.resident)
    for name, size in trace.resident:
        run.hold(_line_of(name, tied), size)
    run.hold("adapters", *[size for _, size in trace.adapters])
    run.hold("token ids", 8 * tokens)
    if holds_gradients:
        run.hold(GRADIENTS, *[size for _, size in trace.adapters])
    for step in range(STEPS):
        begin = 0
        for at in trace.multiplies if step == 0 else []:
            run.play(trace.events[begin:at])
            run.hold("workspaces of cuBLAS", workspace)
            begin = at
        run.play(trace.events[begin : trace.after])
        if step == 0:
            run.hold("optimiser", *_states(trace, optimiser, element))
        run.play(trace.events[trace.after :])
    return run.memory()
