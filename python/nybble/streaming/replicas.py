"""What DistributedDataParallel is told of a streamed model: its base is the same on every rank, and not to be sent."""

from __future__ import annotations

from collections.abc import Iterator

import torch

PREFIXES = ("", "base_model.model.")  # as seen from the model itself, and from PEFT around it


class FrozenNames:
    """Names of the base's frozen parameters at the time of asking, for DDP's _ddp_params_and_buffers_to_ignore.

    DDP would broadcast rank 0's slots into those of the others, whose layers they are not, and the resident tensors,
    which every rank has read from its store.
    """

    def __init__(self, base: torch.nn.Module):
        self._base = base

    def __iter__(self) -> Iterator[str]:
        for name, parameter in self._base.named_parameters():
            if not parameter.requires_grad:
                yield from (prefix + name for prefix in PREFIXES)
