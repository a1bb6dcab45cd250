"""Reads that break the rules on purpose: of a slot that was refilled (stale), or whose refill is in flight.

Every one must end in an error. Under a checkpoint only the owner check can raise it; without one, autograd's version
counter may be first, since a refill bumps it and unpacking precedes the launch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

import nybble
from nybble.gate.aliasing import arms
from nybble.gate.aliasing.cells import Cell, Mode, Ring, Stack
from nybble.gate.aliasing.layers import Base
from nybble.gate.aliasing.ring import SlotRing, in_backward
from nybble.gate.runner import Claim

DIM, TOKENS = 64, 4
ONE_SLOT = Cell(Stack.LINEAR_FILL_FIRST, Ring.ROLLING, Mode.EARLY_STOP, 1)


class Scene:
    """One slot, two layers that want it, and a multiply by layer 0."""

    def __init__(self, device: torch.device):
        shapes = {"weight": (DIM, DIM)}
        self.base = Base(shapes, 2, dense=False, device=device, dtype=torch.bfloat16, seed=0)
        self.ring = SlotRing(self.base, ONE_SLOT, checks=True)
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(TOKENS, DIM, generator=generator).to(device, torch.bfloat16).requires_grad_(True)

    def refill(self, in_flight: bool) -> None:
        """Layer 1 takes the slot; in_flight stops before acquire has waited."""
        if in_flight:
            self.ring.owners.begin_fill(0)
            self.ring.buffers[0].copy_(self.base.blobs[1])
            self.ring.content[0] = None
        else:
            self.ring.acquire(1)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return arms.product(x, self.ring.acquire(0)["weight"])


def forward_read(scene: Scene, in_flight: bool, checkpointed: bool) -> None:
    """The weight is taken, its slot refilled, then the weight is used."""
    weight = scene.ring.acquire(0)["weight"]
    scene.refill(in_flight)
    if checkpointed:
        checkpoint(arms.product, scene.x, weight, use_reentrant=False)
    else:
        arms.product(scene.x, weight)


def backward_read(scene: Scene, in_flight: bool, checkpointed: bool) -> None:
    """The slot is refilled between the (re)computed forward and the launch of its backward."""

    def region(x: torch.Tensor) -> torch.Tensor:
        y = scene.multiply(x)
        if checkpointed and in_backward():
            scene.refill(in_flight)
        return y.sin()  # saves its input, so that the recompute comes this far before anything of it is read

    y = checkpoint(region, scene.x, use_reentrant=False) if checkpointed else region(scene.x)
    if not checkpointed:
        scene.refill(in_flight)
    y.float().sum().backward()


@dataclass(frozen=True)
class Caught:
    """An error without its traceback.

    A checkpointed forward that was left by an exception keeps its saved-tensor hooks in force for as long as the
    exception is referenced, and the next scene would run under them.
    """

    stale: bool
    text: str


def claims(device: torch.device) -> list[Claim]:
    """The eight reads, and two legal ones that must not raise: a check that always raises would pass the eight."""
    found = []
    for (way, read), in_flight, checkpointed in itertools.product(
        {"forward": forward_read, "backward": backward_read}.items(), (False, True), (False, True)
    ):
        caught = _caught(device, lambda scene, read=read, args=(in_flight, checkpointed): read(scene, *args))
        by_version = (
            way == "backward" and not checkpointed and caught is not None and "inplace operation" in caught.text
        )
        holds = caught is not None and (caught.stale or by_version)
        state, frame = "in flight" if in_flight else "stale", "checkpoint" if checkpointed else "no checkpoint"
        found.append(Claim(f"{way} of a slot that is {state}, {frame}, raises", holds, _told(caught)))
    for checkpointed in (False, True):
        caught = _caught(device, lambda scene, args=checkpointed: _legal(scene, args))
        frame = "checkpoint" if checkpointed else "no checkpoint"
        found.append(
            Claim(
                f"forward and backward of a slot that holds its weight, {frame}, do not raise",
                caught is None,
                _told(caught),
            )
        )
    return found


def _legal(scene: Scene, checkpointed: bool) -> None:
    y = checkpoint(scene.multiply, scene.x, use_reentrant=False) if checkpointed else scene.multiply(scene.x)
    y.float().sum().backward()
    if scene.x.grad is None or not bool(scene.x.grad.any()):
        raise RuntimeError("the legal read produced no gradient")


def _caught(device: torch.device, act: Callable[[Scene], None]) -> Caught | None:
    scene = Scene(device)
    try:
        act(scene)
    except Exception as error:  # which error it was is the finding
        return Caught(
            isinstance(error, nybble.StaleWeightError), f"{type(error).__name__}: {str(error).splitlines()[0]}"
        )
    finally:
        scene.ring.close()
    return None


def _told(caught: Caught | None) -> str:
    """The error up to its remedy."""
    return "no error" if caught is None else re.split(r"\. Remedy|\. Hint", caught.text)[0]
