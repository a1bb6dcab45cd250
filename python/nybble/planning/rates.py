"""How fast the link, the multiplies and the memory of the card are: given, measured here, or assumed and marked so."""

from __future__ import annotations

import dataclasses
import time

import torch

from .._library import build_info

# A laptop GPU of 8 GB behind four generations of PCIe on 8 lanes. Assumptions for planning elsewhere, not measurements.
ASSUMED = {"link_gb_s": 12.0, "gemm_tflops": 40.0, "memory_gb_s": 250.0}
_COPY_BYTES = 128 << 20


@dataclasses.dataclass
class Rates:
    """link: page-locked host memory to device, GB/s. gemm: dense 16-bit multiplies, TFLOP/s. memory: bytes that a copy
    on the device reads and writes, GB/s. origin: "given", "measured" or "assumed" for each.
    """

    link_gb_s: float
    gemm_tflops: float
    memory_gb_s: float
    origin: dict[str, str]


def card() -> torch.device | None:
    """The CUDA device that a run would take, or None."""
    if build_info()["cuda"] is None or not torch.cuda.is_available():
        return None
    return torch.device("cuda", torch.cuda.current_device())


def _seconds(call, rounds: int = 5) -> float:
    """The fastest of the rounds, after one that doesn't count."""
    best = float("inf")
    for index in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if index:
            best = min(best, time.perf_counter() - start)
    return best


def measure(device: torch.device, tokens: int, n: int, k: int) -> dict[str, float]:
    """The rates of a card, in under a second: a copy of 128 MiB, a multiply of [tokens, k] by [n, k]."""
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device=device)
    other = torch.empty_like(target)
    x = torch.randn(tokens, k, dtype=torch.bfloat16, device=device)
    weight = torch.randn(n, k, dtype=torch.bfloat16, device=device)
    return {
        "link_gb_s": _COPY_BYTES / _seconds(lambda: target.copy_(host, non_blocking=True)) / 1e9,
        "gemm_tflops": 2 * tokens * n * k / _seconds(lambda: torch.nn.functional.linear(x, weight)) / 1e12,
        "memory_gb_s": 2 * _COPY_BYTES / _seconds(lambda: other.copy_(target)) / 1e9,
    }


def rates(given: dict[str, float | None], tokens: int, shape: tuple[int, int], measured: bool = True) -> Rates:
    """given: rates by name, None for those to measure or assume. ValueError for one that is not positive."""
    for name, value in given.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}, expected a rate above 0")
    known = {name: value for name, value in given.items() if value is not None}
    device = card() if measured and len(known) < len(ASSUMED) else None
    found = measure(device, min(tokens, 8192), *shape) if device is not None else {}
    if found:
        torch.cuda.empty_cache()
    origin = {name: "given" if name in known else "measured" if name in found else "assumed" for name in ASSUMED}
    return Rates(**(ASSUMED | found | known), origin=origin)
