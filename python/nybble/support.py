"""Which torch and which devices nybble runs on, and one sentence for each that it does not run on."""

from __future__ import annotations

import re

import torch

OLDEST_TORCH = (2, 10)  # the level of the stable ABI that the library is built for


def require_torch(version: str) -> None:
    """ImportError for a torch that is older than the library's ABI. version: torch.__version__."""
    found = tuple(int(part) for part in re.match(r"(\d+)\.(\d+)", version).groups())
    if found < OLDEST_TORCH:
        raise ImportError(
            f"torch {version} found, nybble needs {'.'.join(map(str, OLDEST_TORCH))} or newer: pip install -U torch"
        )


def reason_against(device: torch.device, built_for_cuda: bool) -> str | None:
    """None where nybble multiplies on a device, else why not and what to do. built_for_cuda: this library."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"on {device.type}: nybble multiplies on CPUs and NVIDIA GPUs; move the model to one of them"
    if torch.version.hip is not None:
        return f"on an AMD GPU (torch for ROCm {torch.version.hip}): nybble multiplies on CPUs and NVIDIA GPUs"
    if not built_for_cuda:
        return "on a GPU, but this nybble was built without CUDA: install the wheel, or build where nvcc is found"
    return None
