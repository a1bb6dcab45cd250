"""A short LoRA fine-tune, and the comparison of every gradient with the resident model's."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from nybble.demo.progress import ProgressBar

TEXT = Path(__file__).with_name("lighthouse.txt")
LEAST_DROP = 0.1  # of the mean loss, first ten steps to last ten


@dataclass(frozen=True)
class Course:
    """One run: batches of one row of `tokens` tokens."""

    steps: int = 40
    tokens: int = 64
    learning_rate: float = 2e-3
    seed: int = 0


@dataclass(frozen=True)
class Trained:
    """losses: one per step. seconds: of the whole loop."""

    losses: list[float]
    seconds: float

    @property
    def first(self) -> float:
        return sum(self.losses[:10]) / len(self.losses[:10])

    @property
    def last(self) -> float:
        return sum(self.losses[-10:]) / len(self.losses[-10:])

    @property
    def did_train(self) -> bool:
        """False as well for a loss that is not a number."""
        return self.last <= self.first - LEAST_DROP


def batches(tokenizer, tokens: int, seed: int) -> list[torch.Tensor]:
    """The text as rows int64 [1, tokens], shuffled; the ragged end is left out."""
    ids = torch.tensor(tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"])
    rows = list(ids[: len(ids) // tokens * tokens].view(-1, 1, tokens))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return [rows[i] for i in order]


def train(model: torch.nn.Module, rows: list[torch.Tensor], course: Course) -> Trained:
    """AdamW over the adapters, `course.steps` steps, the rows in turn."""
    device = next(p.device for p in model.parameters() if p.requires_grad)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=course.learning_rate)
    bar, losses, started = ProgressBar(course.steps, course.tokens), [], time.monotonic()
    for step in range(course.steps):
        row = rows[step % len(rows)].to(device)
        loss = model(input_ids=row, labels=row).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        bar.update(losses[-1])
    return Trained(losses, time.monotonic() - started)


@dataclass(frozen=True)
class Step:
    """Logits and every adapter gradient of one batch, by name."""

    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]


def one_step(model: torch.nn.Module, row: torch.Tensor) -> Step:
    device = next(p.device for p in model.parameters() if p.requires_grad)
    out = model(input_ids=row.to(device), labels=row.to(device))
    out.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Step(out.logits.detach().clone(), gradients)


@dataclass(frozen=True)
class Comparison:
    """Two steps, bit for bit. A gradient that one side lacks differs; one that is zero everywhere proves nothing."""

    compared: int
    different: int
    zero: int
    logits_equal: bool

    @property
    def equal(self) -> bool:
        return self.compared > 0 and self.different == 0 and self.zero == 0 and self.logits_equal

    def __str__(self) -> str:
        zero = f", {self.zero} are zero" if self.zero else ""
        logits = "equal" if self.logits_equal else "DIFFER"
        return f"{self.compared} gradients compared, {self.different} differ{zero}; logits {logits}"


def compare(got: Step, want: Step) -> Comparison:
    names = got.gradients.keys() | want.gradients.keys()
    shared = got.gradients.keys() & want.gradients.keys()
    same = [name for name in shared if torch.equal(got.gradients[name], want.gradients[name])]
    zero = sum(not bool(gradient.any()) for gradient in want.gradients.values())
    return Comparison(len(names), len(names) - len(same), zero, torch.equal(got.logits, want.logits))
