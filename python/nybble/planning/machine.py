"""The machine that a plan is for: sizes and rates, given, measured here or assumed, and which of these."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import torch

from .rates import Rates, card, rates

CONTEXT_BYTES = 512 << 20  # CUDA's context and loaded kernels, assumed where no card says more
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


@dataclasses.dataclass
class Machine:
    """gpu_bytes, host_bytes: None where nobody said. context_bytes: on the GPU outside of torch's allocator."""

    gpu_bytes: int | None
    host_bytes: int | None
    context_bytes: int
    context_origin: str
    rates: Rates


def parse_bytes(text: str | int | None, what: str) -> int | None:
    """ "8GiB" -> 8589934592. Numbers are bytes."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    if not match or match[2].lower() not in _UNITS or float(match[1]) == 0:
        raise ValueError(f"{what} is {text!r}, expected a size such as 8GiB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def available_host_bytes() -> int | None:
    """What the kernel would give without swapping."""
    try:
        text = pathlib.Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.M)
    return int(found[1]) << 10 if found else None


def machine_of(gpu_memory, host_memory, context, given: dict, tokens: int, shape: tuple[int, int]) -> Machine:
    """What was given, and what this machine has for the rest."""
    gpu, host = parse_bytes(gpu_memory, "gpu_memory"), parse_bytes(host_memory, "host_memory")
    context, origin = parse_bytes(context, "context"), "given"
    found = rates(given, tokens, shape)
    device = card()
    if device is not None and (context is None or gpu is None):
        torch.empty(1, device=device)
        free, total = torch.cuda.mem_get_info(device)
        gpu = gpu or total
        if context is None:
            context, origin = total - free - torch.cuda.memory_reserved(device), "measured, other processes included"
    if context is None:
        context, origin = CONTEXT_BYTES, "assumed"
    return Machine(gpu, host or available_host_bytes(), context, origin, found)
