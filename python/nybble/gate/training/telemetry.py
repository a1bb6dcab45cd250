"""The state of torch's first GPU while something runs: clock, power, memory controller; and the ceilings beside it."""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Iterable

import torch

FIELDS = {"clock_mhz": "clocks.sm", "power_w": "power.draw.instant", "memory_controller_percent": "utilization.memory"}


def first_gpu() -> str:
    """Its name for nvidia-smi, whose indices know nothing of CUDA_VISIBLE_DEVICES."""
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}" if torch.cuda.is_available() else "0"


class Samples:
    """NVML's view, through nvidia-smi, every 100 ms until stop(). Where there is none, every value is None."""

    def __init__(self):
        self.rows: list[tuple[float, ...]] = []
        query = ",".join(FIELDS.values())
        command = [
            "nvidia-smi",
            "-i",
            first_gpu(),
            f"--query-gpu={query}",
            "--format=csv,noheader,nounits",
            "-lms",
            "100",
        ]
        self.process = None
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            try:
                self.rows.append((time.time(), *(float(value) for value in line.split(","))))
            except ValueError:
                continue

    def during(self, spans: Iterable[tuple[float, float]]) -> dict[str, float | None]:
        """Medians over the samples that fall into the spans of wall clock: under load, never idle."""
        spans = list(spans)
        found = [row[1:] for row in self.rows if any(begin <= row[0] <= end for begin, end in spans)]
        columns = list(zip(*found, strict=True)) or [None] * len(FIELDS)
        return {name: statistics.median(c) if c else None for name, c in zip(FIELDS, columns, strict=True)}

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()  # nvidia-smi has nothing to save
            self.process.wait()


def best_seconds(call, repeats: int = 5) -> float:
    """Of a few timed calls on the GPU, by events."""
    call()
    best = float("inf")
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best


def ceilings(size: int = 8192, copy_bytes: int = 1 << 28) -> dict[str, float]:
    """Same-session roofs: a bf16 matmul, a copy on the device, a copy from page-locked host memory."""
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    source = torch.empty(copy_bytes, dtype=torch.uint8, device="cuda")
    target, host = torch.empty_like(source), torch.empty(copy_bytes // 4, dtype=torch.uint8, pin_memory=True)
    part = target[: host.numel()]
    return {
        "gemm_tflops": 2 * size**3 / best_seconds(lambda: a @ b) / 1e12,
        "device_copy_gb_s": 2 * copy_bytes / best_seconds(lambda: target.copy_(source)) / 1e9,
        "host_copy_gb_s": host.numel() / best_seconds(lambda: part.copy_(host, non_blocking=True)) / 1e9,
    }
