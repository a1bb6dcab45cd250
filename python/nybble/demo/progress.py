"""One line that fills while the demo trains; a line every tenth step where the output is no terminal."""

from __future__ import annotations

import sys
import time

WIDTH = 30


class ProgressBar:
    """steps: how many update() calls there will be. tokens: per step."""

    def __init__(self, steps: int, tokens: int):
        self.steps, self.tokens, self.done = steps, tokens, 0
        self.started = time.monotonic()

    def update(self, loss: float) -> None:
        self.done += 1
        seconds = time.monotonic() - self.started
        filled = WIDTH * self.done // self.steps
        rate = self.done * self.tokens / seconds
        left = seconds / self.done * (self.steps - self.done)
        line = f"[{'#' * filled}{'.' * (WIDTH - filled)}] step {self.done}/{self.steps}  loss {loss:.3f}"
        line += f"  {rate:.1f} tokens/s  ETA {left:.0f} s"
        if sys.stdout.isatty():
            print(f"\r{line}  ", end="\n" if self.done == self.steps else "", flush=True)
        elif self.done % 10 == 0 or self.done in (1, self.steps):
            print(line, flush=True)
