#!/usr/bin/env python3
"""The CPU multiply against bitsandbytes and against torch's dense F.linear, in one process, arms interleaved.

    python benchmarks/harness/cpu_linear.py [--shapes 4096x4096,14336x4096] [--rows 1,32,256,1024] [--rounds 7]
                                            [--threads N] [--record benchmarks/records/cpu-linear.json]

bf16, nested NF4, block 64. Both directions: y = x W^T without gradients, and grad_x by torch.autograd.grad.
Correctness comes first: nybble's error against float64 must be at most 1.05 times that of the dense arm, and scales
shifted by one block must be seen. Every round times all arms in a fresh random order; ratios are taken round by
round, with a bootstrap interval. "nybble again" is the same arm once more: how far it is from the first is noise.
Exit: 0 nybble is nowhere slower, 1 it is wrong or somewhere slower, 3 no verdict (noise, or nothing ran).
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import math
import os
import pathlib
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import bitsandbytes
import bitsandbytes.functional
import torch

import nybble

QUESTION = "Is the CPU multiply nowhere slower than bitsandbytes' matmul_4bit and torch's dense bf16 F.linear?"
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "bf16")
ERROR_RATIO = 1.05
SPREAD_LIMIT = 0.05
BYTES_FORMULA = "n k / 2 (codes) + n k / 64 (nested scales) + 4 n k / 16384 (their scales) + 2 m (n + k)"


class Weight:
    """One random weight [n, k] in bitsandbytes' bytes, and the dense bf16 matrix that they stand for."""

    def __init__(self, n: int, k: int):
        dense = torch.randn(n, k, generator=torch.Generator().manual_seed(3)).mul_(0.02).to(torch.bfloat16)
        self.packed, self.state = bitsandbytes.functional.quantize_4bit(
            dense, blocksize=64, compress_statistics=True, quant_type="nf4"
        )
        self.dense = nybble.dequantize_4bit(self.packed, self.state)
        self.n, self.k = n, k


def multiplies(weight: Weight) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    return {
        "nybble": lambda x: nybble.linear(x, weight.packed, weight.state),
        "bitsandbytes": lambda x: bitsandbytes.matmul_4bit(x, weight.packed.t(), weight.state),
        "dense": lambda x: torch.nn.functional.linear(x, weight.dense),
        "nybble again": lambda x: nybble.linear(x, weight.packed, weight.state),
    }


def calls(weight: Weight, rows: int, direction: str) -> tuple[dict[str, Callable[[], torch.Tensor]], torch.Tensor]:
    """The arms as calls without arguments, and the float64 result of their first rows."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, weight.k, generator=generator).to(torch.bfloat16)
    checked = min(rows, 16)
    if direction == "forward":

        def forward(multiply):
            def call():
                with torch.no_grad():
                    return multiply(x)

            return call

        expected = x[:checked].double() @ weight.dense.double().t()
        return {name: forward(multiply) for name, multiply in multiplies(weight).items()}, expected

    grad_y = torch.randn(rows, weight.n, generator=generator).to(torch.bfloat16)
    x.requires_grad_()

    def backward(multiply):
        y = multiply(x)
        return lambda: torch.autograd.grad(y, x, grad_y, retain_graph=True)[0]

    expected = grad_y[:checked].double() @ weight.dense.double()
    return {name: backward(multiply) for name, multiply in multiplies(weight).items()}, expected


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    difference = result[: expected.shape[0]].double() - expected
    return (difference.norm() / expected.norm()).item()


def time_call(call: Callable[[], torch.Tensor], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def interval(ratios: list[float], draws: int = 2000) -> tuple[float, float]:
    """A 95% bootstrap interval of the median."""
    generator = random.Random(5)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def quartile_range(times: list[float]) -> float:
    lower, _, upper = statistics.quantiles(times, n=4)
    return upper - lower


def check(weight: Weight, rows: int, direction: str, errors: dict[str, float]) -> float:
    """Ends the run when nybble is wrong, or when scales shifted by one block would not be seen. Returns their error."""
    limit = ERROR_RATIO * errors["dense"]
    for name in ("nybble", "nybble again"):
        if not errors[name] <= limit:
            raise SystemExit(
                f"{direction}, {rows} rows: {name} has error {errors[name]:.3e}, dense {errors['dense']:.3e}"
            )
    state = weight.state
    weight.state = copy.copy(state)
    weight.state.absmax = state.absmax.roll(1)
    arms, expected = calls(weight, rows, direction)
    error = relative_error(arms["nybble"](), expected)
    weight.state = state
    if error <= limit:
        raise SystemExit(f"{direction}, {rows} rows: scales shifted by one block go unseen, error {error:.3e}")
    return error


def measure(weight: Weight, rows: int, direction: str, rounds: int, order: random.Random) -> dict:
    """One cell: errors, then times of all arms. Times in milliseconds."""
    arms, expected = calls(weight, rows, direction)
    errors = {name: relative_error(call(), expected) for name, call in arms.items()}  # the warm-up too
    cell: dict = {"direction": direction, "m": rows, "n": weight.n, "k": weight.k, "error": errors, "arms": {}}
    cell["error of shifted scales"] = check(weight, rows, direction, errors)
    repeats = {name: max(1, math.ceil(0.03 / time_call(call, 1))) for name, call in arms.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name in order.sample(sorted(arms), len(arms)):
            times[name].append(1e3 * time_call(arms[name], repeats[name]))
    for name, values in times.items():
        median = statistics.median(values)
        cell["arms"][name] = {
            "median_ms": median,
            "iqr_ms": quartile_range(values),
            "spread": quartile_range(values) / median,
            "rounds_ms": values,
            "calls_per_round": repeats[name],
        }
    for name in ("bitsandbytes", "dense", "nybble again"):
        ratios = [ours / theirs for ours, theirs in zip(times["nybble"], times[name], strict=True)]
        cell[f"ratio to {name}"] = {"median": statistics.median(ratios), "interval": interval(ratios)}
    seconds = cell["arms"]["nybble"]["median_ms"] / 1e3
    moved = weight.n * weight.k * (1 / 2 + 1 / 64 + 4 / 16384) + 2 * rows * (weight.n + weight.k)
    cell["gflops"] = 2 * rows * weight.n * weight.k / seconds / 1e9
    cell["gbytes_per_second"] = moved / seconds / 1e9
    cell["verdict"] = verdict(cell)
    return cell


def verdict(cell: dict) -> str:
    """The word for a cell: not slower, slower than whom, or why there is none. Spread counts unless the effect is
    larger than it.
    """
    low, high = cell["ratio to nybble again"]["interval"]
    if low > 1 + SPREAD_LIMIT or high < 1 - SPREAD_LIMIT:
        return f"no verdict: nybble is {low:.2f} to {high:.2f} of itself"
    for name in ("bitsandbytes", "dense"):
        low, high = cell[f"ratio to {name}"]["interval"]
        spread = max(cell["arms"]["nybble"]["spread"], cell["arms"][name]["spread"])
        if low > 1.0 + SPREAD_LIMIT and spread <= SPREAD_LIMIT:
            return f"slower than {name}"
        if high > 1.0:
            return f"no verdict against {name}: {low:.2f} to {high:.2f}, spread {spread:.0%}"
        if spread > SPREAD_LIMIT and high * (1 + spread) > 1.0:
            return f"no verdict against {name}: spread {spread:.0%}"
    return "not slower"


def roofs() -> dict[str, float]:
    """What this machine gives torch right now: an fp32 matrix product (GFLOP/s) and a copy (GB/s, bytes read)."""
    a = torch.randn(1536, 1536)
    source = torch.zeros(1 << 26, dtype=torch.uint8)
    target = torch.empty_like(source)
    sgemm = min(time_call(lambda: a @ a, 1) for _ in range(5))
    copy = min(time_call(lambda: target.copy_(source), 1) for _ in range(5))
    return {"fp32_gemm_gflops": 2 * 1536**3 / sgemm / 1e9, "copy_gbytes_per_second": source.numel() / copy / 1e9}


def git(*args: str) -> str:
    root = pathlib.Path(__file__).parent
    return subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=False).stdout.strip()


def machine() -> dict:
    flags: list[str] = []
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                flags = value.split()
            elif key.strip() == "model name":
                model = value.strip()
    return {
        "cpu": model,
        "features": [name for name in FEATURES if name in flags],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
        "system": platform.platform(),
        "torch": torch.__version__,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "bitsandbytes": bitsandbytes.__version__,
        "nybble": {key: value for key, value in nybble.build_info().items() if key != "library"},
        "python": platform.python_version(),
    }


COLUMNS = (
    "direction", "N x K", "M", "nybble ms", "bitsandbytes ms", "dense ms", "to bitsandbytes", "to dense", "A/A",
    "GFLOP/s", "GB/s", "verdict",
)  # fmt: skip


def table_row(values: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(values) + " |"


def table(cells: list[dict]) -> list[str]:
    lines = [table_row(COLUMNS), "|" + "---|" * len(COLUMNS)]
    for cell in cells:
        times = [cell["arms"][name] for name in ("nybble", "bitsandbytes", "dense")]
        ratios = [cell[f"ratio to {name}"]["median"] for name in ("bitsandbytes", "dense", "nybble again")]
        row = [cell["direction"], f"{cell['n']} x {cell['k']}", str(cell["m"])]
        row += [f"{arm['median_ms']:.2f} ± {arm['iqr_ms']:.2f}" for arm in times]
        row += [f"{ratio:.3f}" for ratio in ratios]
        row += [f"{cell['gflops']:.1f}", f"{cell['gbytes_per_second']:.1f}", cell["verdict"]]
        lines.append(table_row(row))
    return lines


def write_record(path: pathlib.Path, record: dict) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n")
    where, roofs = record["machine"], record["roofs"]
    changed = " with local changes" if record["dirty"] else ""
    text = f"""# The CPU multiply

**Question.** {record["question"]}

**Answer.** {record["answer"]}

{chr(10).join(table(record["cells"]))}

bf16, nested NF4, block 64. Milliseconds: median ± interquartile range of the rounds. Ratios: nybble's time over the
other's, median of the rounds; A/A is nybble over nybble. Dense multiplies the same weights in bf16. grad_input is
`torch.autograd.grad` of each arm.

- Command: `{record["command"]}`, commit {record["commit"]}{changed}, {record["date"]}
- Machine: {where["cpu"]}, {where["cores"]} cores, {where["threads"]} threads, load {where["load_before"]:.1f} before
  the run, {" ".join(where["features"])}
- torch {where["torch"]} ({where["torch_capability"]}), bitsandbytes {where["bitsandbytes"]}, Python {where["python"]}
- Roofs of the same run: fp32 matrix product {roofs["fp32_gemm_gflops"]:.0f} GFLOP/s, copy
  {roofs["copy_gbytes_per_second"]:.1f} GB/s. Bytes: {BYTES_FORMULA}. FLOPs: 2 m n k
- Not measured: other dtypes and block sizes, CPUs with bf16 instructions, clocks and power (not visible in a virtual
  machine); grad_input of more rows: the other arms take 0.13 s a row at 4096 x 4096, so 256 rows would be 34 s a call
"""
    path.with_suffix(".md").write_text(text)


def answer(cells: list[dict]) -> tuple[str, int]:
    slower = [cell for cell in cells if cell["verdict"].startswith("slower")]
    undecided = [cell for cell in cells if cell["verdict"].startswith("no verdict")]
    good = len(cells) - len(slower) - len(undecided)
    text = f"{good} of {len(cells)} cells not slower, {len(slower)} slower, {len(undecided)} without verdict"
    for name in ("bitsandbytes", "dense"):
        worst = max((cell[f"ratio to {name}"]["median"] for cell in cells), default=math.nan)
        text += f"; largest ratio to {name} {worst:.2f}"
    return text + ".", 1 if slower else 3 if undecided or not cells else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--shapes", default="4096x4096,14336x4096", help="N x K, comma separated")
    parser.add_argument("--rows", default="1,32,256,1024")
    parser.add_argument("--grad-rows", default="1,32", help="grad_input's; torch's own takes seconds a call")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--record", type=pathlib.Path, help="JSON file to write, with an .md beside it")
    options = parser.parse_args()
    if options.rounds < 5:
        parser.error(f"--rounds {options.rounds}, expected at least 5: an interval needs them")
    torch.set_num_threads(options.threads)
    record: dict = {
        "question": QUESTION,
        "command": shlex.join(["python", *sys.argv]),
        "commit": git("rev-parse", "--short=12", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(),
        "roofs": roofs(),
        "cells": [],
    }
    print(json.dumps(record["machine"], indent=1), json.dumps(record["roofs"]), sep="\n")
    print(*table([]), sep="\n", flush=True)
    order = random.Random(11)
    for shape in options.shapes.split(","):
        weight = Weight(*(int(size) for size in shape.split("x")))
        for direction, all_rows in (("forward", options.rows), ("grad_input", options.grad_rows)):
            for rows in all_rows.split(","):
                before = nybble.path_counters()["cpu"][direction]
                cell = measure(weight, int(rows), direction, options.rounds, order)
                cell["launches"] = nybble.path_counters()["cpu"][direction] - before
                if cell["launches"] == 0:
                    raise SystemExit(f"{direction}, {rows} rows: the CPU path never ran")
                record["cells"].append(cell)
                print(table([cell])[-1], flush=True)
    record["answer"], code = answer(record["cells"])
    print(record["answer"])
    if options.record:
        write_record(options.record, record)
    return code


if __name__ == "__main__":
    sys.exit(main())
