"""Where the host's time of a layer visit goes: by package, and inside one LoRA projection. For visit_cost.py."""

import contextlib
import cProfile
import gc
import pathlib
import pstats
import time

import torch

from nybble import _ops, autograd
from nybble.linear import multiply

PACKAGES = ("nybble", "peft", "transformers", "bitsandbytes", "torch")


def package(file: str, function: str) -> str:
    """The package that a profiled function's own time is booked on; calls into C++ by what they do."""
    if file == "~":
        if "run_backward" in function:
            return "autograd engine and backward kernels (C++)"
        return "nybble's ops (C++)" if "nybble" in function else "torch's ops and other C++"
    parts = pathlib.PurePath(file).parts
    return next((f"{name} (Python)" for name in PACKAGES if name in parts), "other Python")


def of_step(step, visits: int, steps: int = 4) -> dict[tuple[str, str], tuple[float, float]]:
    """(file, function) -> own microseconds and calls per visit, profiled, which makes Python functions dearer than they
    are. The backward runs on the calling thread meanwhile, so that its recomputation is seen.
    """
    with torch.autograd.set_multithreading_enabled(False):
        step()
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(steps):
            step()
        profile.disable()
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for (file, _, function), (_, calls, own, _, _) in pstats.Stats(profile).stats.items():
        us, count = found.get((file, function), (0.0, 0.0))
        found[file, function] = us + 1e6 * own / steps / visits, count + calls / steps / visits
    return found


def by_package(profile) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for (file, function), (us, calls) in profile.items():
        row = found.setdefault(package(file, function), {"us": 0.0, "calls": 0.0})
        row["us"] += us
        row["calls"] += calls
    return dict(sorted(found.items(), key=lambda item: -item[1]["us"]))


def by_function(profile, count: int = 14) -> list[tuple[str, float, float]]:
    """The dearest functions: name, own microseconds, calls."""
    rows = sorted(profile.items(), key=lambda item: -item[1][0])[:count]
    return [(f"{pathlib.PurePath(file).name}:{function}", us, calls) for (file, function), (us, calls) in rows]


@contextlib.contextmanager
def no_collector():
    """What lives now is never looked at again, and nothing is collected."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@contextlib.contextmanager
def frozen():
    """gc.freeze(): what lives now, libraries and model, is never looked at again."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def one_thread_no_collector():
    with torch.autograd.set_multithreading_enabled(False), no_collector():
        yield


SETTINGS = {
    "usual": contextlib.nullcontext,
    "backward on the calling thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "gc.freeze() after set-up": frozen,
    "no garbage collector": no_collector,
    "no collector, backward on the calling thread": one_thread_no_collector,
}


def projection(streamed) -> dict[str, float]:
    """Best of rounds, microseconds a call: what one projection of a visited layer is made of."""
    layer = streamed.streamed.layers[0]
    lora = layer.self_attn.q_proj
    weight = lora.base_layer._nybble_weight
    n, k = weight.stored.shape
    streamed.fetcher.acquire(0, 0)
    x = torch.randn(1, 1, k, dtype=torch.bfloat16, device=streamed.device, requires_grad=True)
    dense = torch.randn(n, k, dtype=torch.bfloat16, device=streamed.device)

    def no_grad(call):
        def run():
            with torch.no_grad():
                return call()

        return run

    calls = {
        "PEFT's module with its LoRA": lambda: lora(x),
        "  of it: the base module": lambda: lora.base_layer(x),
        "    of it: the multiply with autograd": lambda: multiply(
            x, weight.tensors, None, weight.uid, weight.spec, None
        ),
        "      of it: the op": no_grad(
            lambda: autograd._launch(_ops.linear_4bit, x, *weight.tensors, None, weight.uid, *weight.spec)
        ),
        "F.linear with autograd": lambda: torch.nn.functional.linear(x, dense),
        "F.linear": no_grad(lambda: torch.nn.functional.linear(x, dense)),
    }
    return {name: best_us(call, streamed.device) for name, call in calls.items()}


def best_us(call, device: torch.device, calls: int = 300, rounds: int = 7) -> float:
    """Time until calls are enqueued, the device idle before each round."""
    times = []
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return min(times)
