"""One shape's models: the resident one, and a streamed one for each window, made once for all adapters."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from nybble.gate.training import models
from nybble.gate.training.store import Shape, write_store

TARGETS = {"qv": models.QV, "all": models.ALL}


class ShapeModels:
    """resident: the reference. streamed: by name, a window or "late". adapt() puts adapters on all of them."""

    def __init__(self, shape: Shape, rings: dict[Any, dict[str, Any]], device: torch.device, seed: int):
        """rings: by name, the window and the ring's options."""
        self.switch = models.Switch()
        with tempfile.TemporaryDirectory(prefix="nybble-gate-") as folder:
            store = write_store(Path(folder) / "store", shape, device, seed)
            self._resident = models.resident(store, device, self.switch)
            self._streamed = {name: models.streamed(store, device=device, **ring) for name, ring in rings.items()}
        self.targets = None
        self.resident: torch.nn.Module | None = None
        self.streamed: dict[Any, torch.nn.Module] = {}

    def adapt(self, targets: str) -> None:
        """Adapters on these projections, the same numbers for every model, instead of those before."""
        if targets == self.targets:
            return
        for model in (self.resident, *self.streamed.values()) if self.targets else ():
            model.unload()
        self.resident = models.with_adapters(self._resident, TARGETS[targets])
        self.streamed = {name: models.with_adapters(base, TARGETS[targets]) for name, base in self._streamed.items()}
        self.targets = targets

    def close(self) -> None:
        for model in self.streamed.values():
            models.close(model)


def set_policy(model: torch.nn.Module, policy: str) -> None:
    """recompute and reentrant: the two variants of checkpointing; keep: activations stay, weights are fetched again."""
    keep = policy == "keep"
    if keep:
        model.gradient_checkpointing_disable()
    else:
        kwargs = {"use_reentrant": policy == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    streamed = getattr(model.get_base_model(), "_nybble_streamed", None)
    for visit in streamed.visits if streamed else ():
        visit.keep = keep
