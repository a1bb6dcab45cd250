"""What one multiply costs on the device at hand: every path that takes it, and torch's dense multiply, in one run.

Protocol: random weights rotate, so that three times the L2 cache lies between two uses of one; on a GPU each arm is a
CUDA graph of several calls; arms are shuffled in every round; medians. Times include everything a call does on the
device. Spread: (max - min) / median of the rounds.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable

import torch

from . import _ops
from .counters import path_counters, reset_path_counters
from .plan import explain
from .quant_state import MODE_CODES, QuantState, nested_table, table, weight_args
from .tune_table import forced

FUSED_PATHS = ("row", "portable", "small_m", "hopper")
BLOCK = 64
_GRAPH_US = 1500  # of device time that one replay should have
_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclasses.dataclass(frozen=True)
class Problem:
    """y[m][n] = x[m][k] W^T for "forward", grad_x[m][k] = grad_y[m][n] W for "grad_input"; NF4, nested, block 64."""

    n: int
    k: int
    m: int
    direction: str
    dtype: torch.dtype = torch.bfloat16

    @property
    def dtype_name(self) -> str:
        return _DTYPE_NAMES[self.dtype]


@dataclasses.dataclass
class Times:
    """us: microseconds of each arm: the fused paths that take the problem, "cpu" on a CPU, "dequant" (dequantise and
    multiply), "dequantise" (that part alone) and "dense" (torch's multiply by a dense weight). auto: the path that mode
    "auto" takes, seen on the counters; plan: its plan in words.
    """

    problem: Problem
    us: dict[str, float]
    spread: dict[str, float]
    auto: str
    plan: str

    @property
    def measured(self) -> bool:
        """Whether the thresholds behind the choice come from a record of this kind of card, or from a tune table."""
        return ", measured" in self.plan


class Weights:
    """Random 4-bit weights of one shape, packed and dense, enough of them to keep every use out of the L2 cache."""

    def __init__(self, n: int, k: int, dtype: torch.dtype, device: torch.device):
        self.n, self.k, self.dtype, self.device = n, k, dtype, device
        self.packed = [self._random() for _ in range(self._copies(n * k // 2))]
        self.states = [weight_args(packed, state) for packed, state in self.packed]
        self.dense = [self.dequantized(i) for i in range(min(len(self.states), self._copies(n * k * 2)))]

    def _copies(self, size_bytes: int) -> int:
        if self.device.type != "cuda":
            return 2
        free, _ = torch.cuda.mem_get_info(self.device)
        rotate = 3 * torch.cuda.get_device_properties(self.device).L2_cache_size
        return int(max(2, min(-(-rotate // size_bytes), free // 8 // size_bytes)))

    def _random(self):
        n, k, device = self.n, self.k, self.device
        blocks = -(-n * k // BLOCK)
        packed = torch.randint(0, 256, ((n * k + 1) // 2, 1), dtype=torch.uint8, device=device)
        codes = torch.randint(0, 256, (blocks,), dtype=torch.uint8, device=device)
        inner = torch.rand(-(-blocks // 256), device=device) * 0.02 + 0.01
        state2 = QuantState(inner, code=nested_table(device), blocksize=256, dtype=torch.float32)
        meta = dict(blocksize=BLOCK, quant_type="nf4", dtype=self.dtype)
        offset = torch.tensor(0.04, device=device)
        return packed, QuantState(codes, torch.Size((n, k)), table("nf4", device), offset=offset, state2=state2, **meta)

    def dequantized(self, i: int) -> torch.Tensor:
        w = self.states[i % len(self.states)]
        return _ops.dequantize_4bit(
            *w.tensors, None, *w.shape, w.blocksize, w.quant_type, w.nested_dtype, w.state_dtype
        )

    def multiply(self, x: torch.Tensor, i: int, direction: str, mode: str) -> torch.Tensor:
        w = self.states[i % len(self.states)]
        spec = (*w.shape, w.blocksize, w.quant_type, w.state_dtype, w.nested_dtype, MODE_CODES[mode], False)
        if direction == "forward":
            return _ops.linear_4bit(x, *w.tensors, None, None, *spec)
        return _ops.linear_4bit_grad_input(x, *w.tensors, None, *spec)

    def matmul(self, x: torch.Tensor, i: int, direction: str, out: torch.Tensor) -> torch.Tensor:
        w = self.dense[i % len(self.dense)]
        return torch.mm(x, w.t() if direction == "forward" else w, out=out)


def _ran(body: Callable[[int], object], direction: str) -> str:
    """The one path whose counter a call moves."""
    reset_path_counters()
    body(0)
    ran = [path for path, counts in path_counters().items() if counts[direction]]
    if len(ran) != 1:
        raise RuntimeError(f"one call moved the counters of {ran or 'no path'}, expected one path")
    return ran[0]


def _arms(problem: Problem, weights: Weights) -> tuple[dict[str, Callable[[int], object]], str]:
    """arm -> body(i), and the activations' plan in words. A body of a fused path is only valid under its table."""
    rows, columns = (problem.k, problem.n) if problem.direction == "forward" else (problem.n, problem.k)
    x = torch.randn(problem.m, rows, dtype=problem.dtype, device=weights.device)
    out = torch.empty(problem.m, columns, dtype=problem.dtype, device=weights.device)
    arms: dict[str, Callable[[int], object]] = {
        "auto": lambda i: weights.multiply(x, i, problem.direction, "auto"),
        "dequant": lambda i: weights.multiply(x, i, problem.direction, "dequant"),
        "dequantise": weights.dequantized,
        "dense": lambda i: weights.matmul(x, i, problem.direction, out),
    }
    return arms, explain(x, *weights.packed[0], direction=problem.direction)


class _CpuArm:
    """Calls on the clock of the host."""

    def __init__(self, body, calls):
        self.body, self.calls = body, calls

    def us(self) -> float:
        start = time.perf_counter()
        for i in range(self.calls):
            self.body(i)
        return (time.perf_counter() - start) * 1e6 / self.calls


class _CudaArm:
    """Calls captured in one CUDA graph."""

    def __init__(self, body, calls):
        self.calls = calls
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            body(0)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(calls):
                body(i)
        self.graph.replay()
        self.begin, self.end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def us(self) -> float:
        self.begin.record()
        self.graph.replay()
        self.end.record()
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) * 1e3 / self.calls


def measure(problem: Problem, weights: Weights, rounds: int = 9) -> Times:
    """Times every path on this problem. The active tune table is consulted for `auto` and is the same afterwards."""
    arms, plan = _arms(problem, weights)
    cuda = weights.device.type == "cuda"
    auto = _ran(arms["auto"], problem.direction)
    calls = 3
    if cuda:
        guess = _CudaArm(arms["dense"], 2)
        calls = max(2, min(len(weights.states), 40, int(_GRAPH_US / max(guess.us(), 1.0))))
    make = _CudaArm if cuda else _CpuArm
    timed = {name: make(body, calls) for name, body in arms.items() if name != "auto"}
    if cuda:
        device = torch.cuda.get_device_name(weights.device)
        for path in FUSED_PATHS:
            with forced(device, problem, path):
                if _ran(arms["auto"], problem.direction) == path:
                    timed[path] = make(arms["auto"], calls)
    else:
        timed["cpu"] = make(arms["auto"], calls)
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        order = list(timed)
        random.shuffle(order)
        for name in order:
            samples[name].append(timed[name].us())
    us = {name: statistics.median(values) for name, values in samples.items()}
    spread = {name: (max(values) - min(values)) / us[name] for name, values in samples.items()}
    return Times(problem, us, spread, auto, plan)
