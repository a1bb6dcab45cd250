"""A model in training whose every step leaves proof that it trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass
class Proof:
    """What one arm's steps left: norms before zero_grad, losses, and the largest change of an adapter."""

    norms: list[torch.Tensor] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    change: float = 0.0

    def fault(self) -> str | None:
        """Why this was no training, or None."""
        norms, losses = [float(n) for n in self.norms], [float(loss) for loss in self.losses]
        if not norms:
            return "no step was taken"
        if not all(0 < norm < float("inf") for norm in norms):
            return f"gradient norms {min(norms):.3g} .. {max(norms):.3g}, expected all above 0 and finite"
        if not all(abs(loss) < float("inf") for loss in losses) or len(set(losses)) < 2:
            return f"the loss does not move: {losses[0]:.6g} .. {losses[-1]:.6g} in {len(losses)} steps"
        if not self.change > 0:
            return "the adapters did not change"
        return None


class Trainee:
    """Steps of AdamW on the adapters of one model, one batch over and over."""

    def __init__(self, model: torch.nn.Module, ids: torch.Tensor, rate: float = 1e-3):
        self.model, self.ids = model, ids
        self.adapters = [p for p in model.parameters() if p.requires_grad]
        self.optimiser = torch.optim.AdamW(self.adapters, lr=rate, weight_decay=0.0)
        self.proofs: dict[str, Proof] = {}

    def steps(self, arm: str, count: int, weight: float = 1.0) -> None:
        """Trains on weight * loss; nothing here waits for the device."""
        proof = self.proofs.setdefault(arm, Proof())
        for _ in range(count):
            loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
            (weight * loss).backward()
            norms = [p.grad.norm() for p in self.adapters if p.grad is not None]
            proof.norms.append(torch.stack(norms).norm() if norms else torch.zeros(()))
            self.optimiser.step()
            self.optimiser.zero_grad(set_to_none=True)
            proof.losses.append(loss.detach())

    def prove(self, arm: str, act: Callable[[Trainee, str, int], None], count: int) -> None:
        """Lets an arm act outside of the timing, with the adapters compared before and after."""
        before = [p.detach().clone() for p in self.adapters]
        act(self, arm, count)
        changes = [(p.detach().float() - b.float()).abs().max() for p, b in zip(self.adapters, before, strict=True)]
        self.proofs[arm].change = float(torch.stack(changes).max())
