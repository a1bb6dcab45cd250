"""The two small streamed models of the gate. A layer is one checkpointed region that acquires weights from a ring."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from nybble.gate.aliasing.arms import Copies, Multiply
from nybble.gate.aliasing.cells import Cell, Mode, Stack
from nybble.gate.aliasing.ring import SlotRing, in_backward

RANK = 4
ADAPTED = {
    Stack.LLAMA_QV: ("q", "v"),
    Stack.LLAMA_ALL: ("q", "k", "v", "o", "gate", "up", "down"),
}


@dataclass(frozen=True)
class Sizes:
    """What can be made larger from the command line."""

    layers: int = 8
    dim: int = 64  # K and N of the linear stack, hidden size of the Llama-shaped one
    tokens: int = 8
    heads: int = 2

    def weights(self, cell: Cell) -> dict[str, tuple[int, int]]:
        """(N, K) of a layer's weights, in the order in which they are used."""
        if not cell.is_llama:
            return {"weight": (self.dim, self.dim)}
        inner = self.dim * 2
        square = dict.fromkeys(("q", "k", "v", "o"), (self.dim, self.dim))
        return {**square, "gate": (inner, self.dim), "up": (inner, self.dim), "down": (self.dim, inner)}

    def vectors(self, cell: Cell) -> dict[str, int]:
        """Sizes of what else a layer streams: its norms."""
        return dict.fromkeys(("norm", "ffn_norm"), self.dim) if cell.is_llama else {}


@dataclass
class Parameters:
    """The trainable tensors by layer, and those among them that must not be zero for the gradients to mean anything."""

    by_layer: list[dict[str, torch.Tensor]]
    must_be_nonzero: list[torch.Tensor] = field(default_factory=list)

    def forget(self) -> None:
        """Drops the gradients of the last step."""
        for value in (value for own in self.by_layer for value in own.values()):
            value.grad = None


def make_parameters(cell: Cell, sizes: Sizes, *, device: torch.device, dtype: torch.dtype, seed: int = 1) -> Parameters:
    """A scale per input feature (linear), or LoRA A and B of every adapted weight.

    B is random: with B = 0 every gradient of A is 0.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float, around: float = 0.0) -> torch.Tensor:
        value = around + scale * torch.randn(*shape, generator=generator)
        return value.to(device, dtype).requires_grad_(True)

    result = Parameters([])
    for _ in range(sizes.layers):
        layer = {}
        if not cell.is_llama:
            layer["scale"] = draw(sizes.dim, scale=0.01, around=1.0)
            result.must_be_nonzero.append(layer["scale"])
        for name in ADAPTED.get(cell.stack, ()):
            n, k = sizes.weights(cell)[name]
            layer[f"{name}.A"] = draw(RANK, k, scale=k**-0.5)
            layer[f"{name}.B"] = draw(n, RANK, scale=0.1)
            result.must_be_nonzero.append(layer[f"{name}.B"])
        result.by_layer.append(layer)
    return result


@functools.cache
def first_input(tokens: int, dim: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """What every step of every arm begins with. Kept on the device, which no copy has to wait for then."""
    return torch.randn(tokens, dim, generator=torch.Generator().manual_seed(2)).to(device, dtype)


@dataclass
class Step:
    """What one forward and backward left behind."""

    outputs: list[torch.Tensor]  # of every layer
    gradients: list[dict[str, torch.Tensor]]  # by layer
    input_gradient: torch.Tensor | None


class StreamedModel:
    """A stack of `sizes.layers` checkpointed layers whose weights pass through `ring`."""

    def __init__(self, cell: Cell, sizes: Sizes, ring: SlotRing, multiply: Multiply, copies: Copies = Copies.NONE):
        self.cell, self.sizes, self.ring, self.multiply, self.copies = cell, sizes, ring, multiply, copies
        square, base = (sizes.tokens, sizes.tokens), ring.base
        self.future = torch.full(square, float("-inf"), device=base.device, dtype=base.dtype).triu(1)

    def step(self, parameters: Parameters) -> Step:
        """One forward and one backward. Raises what the multiply raises."""
        region = self.llama_layer if self.cell.is_llama else self.linear_layer
        parameters.forget()
        base = self.ring.base
        entry = x = first_input(self.sizes.tokens, self.sizes.dim, base.device, base.dtype).clone().requires_grad_(True)
        outputs = []
        with set_checkpoint_early_stop(self.cell.mode is not Mode.NO_EARLY_STOP):  # read when a region is entered
            for index, own in enumerate(parameters.by_layer):
                x = self._checkpointed(region, index, own, x)
                outputs.append(x.detach().clone())
        x.float().pow(2).mean().backward()
        gradients = [{k: v.grad for k, v in own.items() if v.grad is not None} for own in parameters.by_layer]
        return Step(outputs, gradients, entry.grad)

    def _checkpointed(self, region, index: int, own: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        names = tuple(own)

        def layer(h: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
            return region(h, dict(zip(names, values, strict=True)), index)

        return checkpoint(layer, x, *own.values(), use_reentrant=self.cell.mode is Mode.REENTRANT)

    def linear_layer(self, x: torch.Tensor, own: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        """A trainable scale, then one multiply, whose backward computes the scale's gradient from the weight."""
        if self.cell.fill_first:
            weight = self.acquire(index)["weight"]
            return self.multiply(x * own["scale"], weight)
        h = x * own["scale"]
        return self.multiply(h, self.acquire(index)["weight"])

    def acquire(self, index: int) -> dict:
        """A layer's weights and vectors; private copies of what the arm copies."""
        return self.copies.of(self.ring.acquire(index), in_backward())

    def llama_layer(self, x: torch.Tensor, own: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        """Norm, causal attention, norm, SwiGLU. Attention is spelled out: its backward must be repeatable."""
        weights = self.acquire(index)

        def project(name: str, h: torch.Tensor) -> torch.Tensor:
            y = self.multiply(h, weights[name])
            if f"{name}.A" not in own:
                return y
            return y + (h @ own[f"{name}.A"].T) @ own[f"{name}.B"].T

        tokens = self.sizes.tokens
        h = rms_norm(x) * weights["norm"]
        q, k, v = (project(name, h).view(tokens, self.sizes.heads, -1).transpose(0, 1) for name in ("q", "k", "v"))
        scores = (q @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
        mixed = (scores + self.future).softmax(-1) @ v
        x = x + project("o", mixed.transpose(0, 1).reshape(tokens, -1))
        h = rms_norm(x) * weights["ffn_norm"]
        return x + project("down", torch.nn.functional.silu(project("gate", h)) * project("up", h))


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6)
