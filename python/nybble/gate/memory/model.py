"""Peaks of one generated Llama, resident and under nybble.stream. Needs transformers, peft and bitsandbytes: import it
where a gate runs.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

import nybble
from nybble.gate.memory.peaks import Account
from nybble.gate.runner import repeatable_algorithms
from nybble.gate.training import models
from nybble.gate.training.store import Shape, write_store


@dataclass
class Model:
    """What the arms of a model's cell share. All in bytes; peaks are of a whole training step, weights included."""

    resident_peak: int
    base: int  # the packed layers
    layer: int
    peak: Callable[[bool], int] = field(repr=False)  # of the streamed model; True: with private copies

    def formula(self, window: int) -> int:
        """What streaming promises, without its constant: the resident peak, and a window instead of the base."""
        return self.resident_peak - self.base + window * self.layer


def measured(shape: Shape, tokens: int, window: int, device: torch.device, seed: int) -> Model:
    """Generates a store and measures the resident model; the streamed one is built when its peak is asked for."""
    folder = tempfile.TemporaryDirectory(prefix="nybble-gate-")
    store = write_store(Path(folder.name) / "store", shape, device, seed)

    def streamed(copies: bool) -> int:
        with folder_of(folder), Account(device) as account:
            model = models.with_adapters(models.streamed(store, window, device, "sdpa"))
            models.set_streamed(model, copies=copies)
            try:
                return peak_of_step(model, shape, tokens, account)
            finally:
                models.close(model)

    with Account(device) as account:
        model = models.with_adapters(models.resident(store, device, models.Switch(), "sdpa"))
        resident_peak = peak_of_step(model, shape, tokens, account)
    base = sum(packed_bytes(module) for module in models.switched_linears(model))
    del model
    gc.collect()
    return Model(resident_peak, base, slot_bytes(store, device), streamed)


@contextlib.contextmanager
def folder_of(folder: tempfile.TemporaryDirectory):
    """Keeps the folder while it is used; what the call made is freed before the next one measures."""
    try:
        yield folder.name
    finally:
        gc.collect()


def packed_bytes(module: torch.nn.Module) -> int:
    """Of a resident linear's weight and scales, without a slot's padding."""
    state = module.weight.quant_state
    parts = (module.weight, state.absmax, state.offset, state.state2.absmax)
    return sum(part.numel() * part.element_size() for part in parts)


def slot_bytes(store: Path, device: torch.device) -> int:
    """Of one layer in a slot."""
    model = models.streamed(store, 1, device)
    size = nybble.memory_stats(model)["layer_bytes"]
    model._nybble_streamed.close()
    return size


def peak_of_step(model: torch.nn.Module, shape: Shape, tokens: int, account: Account) -> int:
    """Of the second step: the first makes what stays."""
    ids = torch.randint(0, shape.vocab, (1, tokens), generator=torch.Generator().manual_seed(0))
    ids = ids.to(next(model.parameters()).device)
    with repeatable_algorithms("default"):
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            account.restart()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        peak = account.peak()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    if not gradients or not all(g is not None and bool(g.any()) for g in gradients):
        raise RuntimeError("the step left no gradient, expected one for every adapter")
    return peak
