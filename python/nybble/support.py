"""Which torch and which devices nybble runs on, and one sentence for each that it does not run on."""

from __future__ import annotations

import platform
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


def foreign_torch() -> str | None:
    """What else than CPUs and NVIDIA GPUs this torch is built for: "ROCm 7.0", "XPU", "MPS"; None for nothing."""
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    if getattr(torch.version, "xpu", None) is not None:
        return "XPU"
    return "MPS" if torch.backends.mps.is_built() else None


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


def torch_report() -> dict[str, str]:
    """What `nybble doctor` prints of Python: python, torch, torch_cuda ("" without CUDA), problem ("" for none)."""
    foreign = foreign_torch()
    problem = (
        f"torch {torch.__version__} is built for {foreign}; nybble multiplies on CPUs and NVIDIA GPUs, so there it "
        "runs on the CPU only"
        if foreign
        else ""
    )
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda or "",
        "problem": problem,
    }
