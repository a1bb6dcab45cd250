"""Once a run: do the path counters tell the truth? They are compared with the profiler's kernel names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

import nybble
from nybble.gate.multiply import Weight, moved, multiply, random_operand
from nybble.gate.runner import Claim

# A path's multiply, and nothing else of ours: (namespace, function name begins with).
KERNELS = {
    "hopper": ("nybble::hopper::", "multiply"),
    "small_m": ("nybble::small_m::", "multiply"),
    "portable": ("nybble::portable::", "portable_kernel"),
    "row": ("nybble::row::", "row_forward"),
    "dequant": ("nybble::format::", "dequantize_kernel"),
}
GRADS = {"row": ("nybble::row::", "row_grad")}


def kernel_claims(
    cells: Iterable[Any], weight_of: Callable[[int, int, int], Weight], device: torch.device, left_out: dict[str, str]
) -> list[Claim]:
    """For one cell of every (path, direction) that the gate met: launches that the counters saw are those that ran."""
    if device.type != "cuda":
        left_out["counters against the profiler's kernel names"] = "no GPU: nothing to profile"
        return []
    chosen = {(cell.plan.path, cell.direction): cell for cell in cells}
    claims = []
    for (path, direction), cell in sorted(chosen.items()):
        weight = weight_of(cell.n, cell.k, cell.seed)
        operand = random_operand(cell.m, weight.columns(direction)[0], device, 0)
        multiply(direction, operand, weight)
        names, launched = profiled(lambda d=direction, o=operand, w=weight: multiply(d, o, w))
        ran = {p: count for p in KERNELS if (count := sum(of_path(name, p, direction) for name in names))}
        counted = {key.split(".")[0]: count for key, count in launched.items()}
        shown = ", ".join(sorted({name.split("<")[0].split("(")[0] for name in names}))
        claims.append(
            Claim(
                f"the counter of {path} {direction} is what the profiler saw at M {cell.m}",
                bool(names) and ran == counted == {path: 1},
                f"counters {counted}, kernels {ran} ({shown})",
            )
        )
    return claims


def of_path(name: str, path: str, direction: str) -> bool:
    """Is this profiler's name the multiply of a path? Names may begin with `void` and carry template arguments."""
    space, function = GRADS.get(path, KERNELS[path]) if direction != "forward" else KERNELS[path]
    return any(space + middle + function in name for middle in ("", "(anonymous namespace)::", "strip::"))


def profiled(call: Callable[[], Any]) -> tuple[list[str], dict[str, int]]:
    """(names of the kernels that a call ran on the GPU, path counters that it moved)."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    before = nybble.path_counters()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as record:
        call()
        torch.cuda.synchronize()
    launched = moved(before, nybble.path_counters())
    events = [e for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in events], launched
