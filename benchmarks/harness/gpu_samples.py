"""Clock, power and memory-controller utilisation of a GPU, sampled by nvidia-smi beside a measurement."""

import statistics
import subprocess
import threading
import time

FIELDS = {"clock_mhz": "clocks.sm", "power_w": "power.draw", "memory_controller_percent": "utilization.memory"}


class GpuSamples:
    """Every 100 ms until stop(). Without nvidia-smi every value is None."""

    def __init__(self):
        self._samples = []
        query = ",".join(FIELDS.values())
        command = ["nvidia-smi", "-i", "0", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-lms", "100"]
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except OSError:
            self._process = None
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self._process.stdout:
            try:
                self._samples.append((time.time(), *[float(value) for value in line.split(",")]))
            except ValueError:
                continue

    def during(self, spans) -> dict[str, float | None]:
        """Medians over the samples of the spans [(start, end)], in seconds of time.time()."""
        found = [s for s in self._samples if any(start <= s[0] <= end for start, end in spans)]
        columns = zip(*[sample[1:] for sample in found], strict=True) if found else [[None]] * len(FIELDS)
        return {name: statistics.median(c) if found else None for name, c in zip(FIELDS, columns, strict=True)}

    def stop(self):
        if self._process:
            self._process.terminate()
