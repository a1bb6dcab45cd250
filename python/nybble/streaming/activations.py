"""Which layers keep their activations: fixed per layer, or as many as memory allows by the measure of one step.

A layer that keeps is not recomputed, whatever gradient checkpointing says; its weights are fetched again in backward.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch._C import _current_graph_task_id

from ..errors import UnsupportedError

POLICIES = ("recompute", "keep")
MARGIN = 0.03  # of the device's memory, left alone
_AFTER_OOM = 0.85  # of what was used, when that was too much

_log = logging.getLogger("nybble")


def fixed(activations, layers: int) -> list[bool]:
    """Per layer, whether it keeps. activations: a policy, one for each layer, how many of the last layers keep, or a
    function of the layer's index that returns a policy. ValueError for anything else.
    """
    if isinstance(activations, bool) or activations is None:
        given = [activations]
    elif isinstance(activations, int):
        given = ["keep" if index >= layers - activations else "recompute" for index in range(layers)]
        given = given if 0 <= activations <= layers else []
    elif isinstance(activations, str):
        given = [activations] * layers
    else:
        given = [activations(index) for index in range(layers)] if callable(activations) else list(activations)
    if len(given) != layers or any(policy not in POLICIES for policy in given):
        raise ValueError(
            f'activations is {activations!r}, expected "recompute", "keep" or "auto"; a list or a function with one of '
            f"the first two for each of {layers} layers; or how many of the last layers keep"
        )
    return [policy == "keep" for policy in given]


class CudaMeter:
    """Bytes of one device as torch's allocator counts them."""

    def __init__(self, device: torch.device):
        self.device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def limit(self) -> int:
        """What this process could reserve: what it has and what is free, at most its share of the device."""
        free, total = torch.cuda.mem_get_info(self.device)
        share = torch.cuda.get_per_process_memory_fraction(self.device)
        return min(free + torch.cuda.memory_reserved(self.device), int(share * total))

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peaks(self) -> tuple[int, int]:
        """Allocated, reserved, since start()."""
        return torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)

    def failures(self) -> int:
        """Allocations that failed so far, or that took giving the cache back."""
        stats = torch.cuda.memory_stats(self.device)
        return stats.get("num_ooms", 0) + stats.get("num_alloc_retries", 0)


def meter_of(device: torch.device) -> CudaMeter:
    if device.type != "cuda":
        raise UnsupportedError(
            f'activations="auto" measures the memory of a GPU, found device {device}; use "recompute", "keep" or a '
            "number of layers"
        )
    return CudaMeter(device)


class AutoKeep:
    """Decides at the start of every training forward how many of the last layers keep.

    The first step recomputes every layer and is measured: `rest`, by which the peak rises above what was allocated at
    the start of its forward, and `layer`, by which a layer's recomputation raises what is allocated, which is what it
    would keep. From then on a forward of t tokens may keep n layers as long as

        charge * (allocated now + rest * max(1, t / measured tokens) + n * layer * t / measured tokens) <= limit

    with charge = reserved / allocated, both at the measured peak, so that rounding and gaps of the allocator are paid
    for. Optimiser states, kept gradients and other live graphs are in `allocated now`. When memory has run out since
    the last forward, the limit comes down, with a warning.
    """

    def __init__(self, visits: Sequence, meter):
        self._visits = visits
        self._meter = meter
        self._state = "new"  # then "measuring", "ready"
        self._tokens = self._start = self._layer = self._rest = 0
        self._charge = 1.0
        self._cap = math.inf
        self._failures = meter.failures()
        self._before: dict[int, int] = {}
        self.keeps = 0

    # ---- what the model reports

    def forward_begins(self, tokens: int) -> None:
        """Before a training forward that records gradients."""
        if self._state == "measuring" and self._layer > 0:
            self._finish()
        if self._state == "new":
            self._state, self._tokens, self._layer = "measuring", tokens, 0
            self._start = self._meter.allocated()
            self._meter.start()
        if self._state == "ready":
            self._notice_failures()
            self._set(self._affordable(tokens))
        elif self._state == "measuring":
            self._tokens = max(self._tokens, tokens)
            self._set(0)

    def recomputation_begins(self, layer: int) -> None:
        if self._state == "measuring":
            self._before[layer] = self._meter.allocated()

    def recomputation_ends(self, layer: int) -> None:
        if self._state == "measuring" and layer in self._before:
            self._layer = max(self._layer, self._meter.allocated() - self._before.pop(layer))

    # ---- decisions

    def _finish(self) -> None:
        allocated, reserved = self._meter.peaks()
        self._rest = max(0, allocated - self._start)
        self._charge = max(1.0, reserved / max(1, allocated))
        self._state = "ready"
        self._failures = self._meter.failures()

    def _limit(self) -> float:
        return min(self._cap, self._meter.limit() * (1 - MARGIN))

    def _affordable(self, tokens: int) -> int:
        scale = tokens / self._tokens
        left = self._limit() / self._charge - self._meter.allocated() - self._rest * max(1.0, scale)
        return int(max(0, min(len(self._visits), left // (self._layer * scale))))

    def _notice_failures(self) -> None:
        failures = self._meter.failures()
        if failures > self._failures and self.keeps > 0:
            _, reserved = self._meter.peaks()
            self._cap = _AFTER_OOM * min(self._limit(), reserved)
            warnings.warn(
                f'activations="auto": the GPU ran out of memory while {self.keeps} of {len(self._visits)} layers kept '
                f"their activations; from now on at most {self._cap / 2**20:.0f} MiB are used, so that fewer keep",
                stacklevel=2,
            )
        self._failures = failures

    def _set(self, keeps: int) -> None:
        if keeps != self.keeps and self._state == "ready":
            _log.info("%d of %d layers keep their activations", keeps, len(self._visits))
        self.keeps = keeps
        first = len(self._visits) - keeps
        for index, visit in enumerate(self._visits):
            visit.keep = index >= first


def watch(decoder: torch.nn.Module, visits: Sequence, auto: AutoKeep) -> Callable[[], None]:
    """Has the decoder's forwards and the layers' recomputations reported to `auto`. Returns what undoes it."""

    def begins(module, args, kwargs):
        if not (module.training and torch.is_grad_enabled()) or _current_graph_task_id() != -1:
            return
        ids = kwargs.get("inputs_embeds")
        ids = ids if ids is not None else kwargs.get("input_ids", args[0] if args else None)
        if ids is not None:
            auto.forward_begins(ids.shape[0] * ids.shape[1])

    handle = decoder.register_forward_pre_hook(begins, with_kwargs=True)
    for visit in visits:
        visit.auto = auto

    def undo() -> None:
        handle.remove()
        for visit in visits:
            visit.auto = None

    return undo
