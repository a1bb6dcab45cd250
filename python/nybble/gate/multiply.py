"""One multiply of one random 4-bit weight in one direction, through nybble, through torch, and in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import nybble
from nybble import autograd
from nybble.quant_state import MODE_CODES, weight_args
from nybble.quantize import dense_weight

FORWARD, GRAD_INPUT = "forward", "grad_input"
BLOCK = 64


@dataclass(frozen=True)
class Weight:
    """W [n, k] in NF4 with nested scales."""

    packed: torch.Tensor
    state: nybble.QuantState

    @property
    def n(self) -> int:
        return self.state.shape[0]

    @property
    def k(self) -> int:
        return self.state.shape[1]

    def dense(self) -> torch.Tensor:
        """W [n, k] as the dequant path multiplies it."""
        return dense_weight(self.packed, self.state)

    def columns(self, direction: str) -> tuple[int, int]:
        """(of the operand, of the result)."""
        return (self.k, self.n) if direction == FORWARD else (self.n, self.k)


def random_weight(
    n: int, k: int, device: torch.device, seed: int, dtype: torch.dtype = torch.bfloat16, nested: bool = True
) -> Weight:
    """N(0, 1/k) values, quantised on the device. nested: absmax in 8 bits."""
    generator = torch.Generator(device).manual_seed(seed)
    dense = torch.randn(n, k, generator=generator, device=device) * k**-0.5
    return Weight(*nybble.quantize_4bit(dense.to(dtype), blocksize=BLOCK, quant_type="nf4", compress_statistics=nested))


def random_operand(m: int, columns: int, device: torch.device, seed: int, dtype=torch.bfloat16) -> torch.Tensor:
    """N(0, 1) [m, columns]."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(m, columns, generator=generator, device=device).to(dtype)


@torch.no_grad()
def multiply(
    direction: str, operand: torch.Tensor, weight: Weight, mode: str = "auto", batch_invariant: bool = False
) -> torch.Tensor:
    """y [m, n] of x, or grad_x [m, k] of grad_y, by the op that training calls."""
    if direction == FORWARD:
        return nybble.linear(operand, weight.packed, weight.state, mode=mode, batch_invariant=batch_invariant)
    args = weight_args(weight.packed, weight.state)
    spec = (*args.shape, args.blocksize, args.quant_type, args.state_dtype, args.nested_dtype, MODE_CODES[mode])
    return autograd.launch_grad_input(operand, (*args.tensors, None), (*spec, batch_invariant), None)


def dense_multiply(direction: str, operand: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """The same by torch on a dense W [n, k]."""
    return torch.nn.functional.linear(operand, dense) if direction == FORWARD else operand @ dense


def exact_multiply(direction: str, operand: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """The same in float64, from the same weight bits."""
    return dense_multiply(direction, operand.double(), dense.double())


def moved(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> dict[str, int]:
    """The path counters that moved between two readings, as {"cpu.forward": 16, ...}."""
    counts = {(path, way): count - before[path][way] for path, ways in after.items() for way, count in ways.items()}
    return {f"{path}.{way}": count for (path, way), count in counts.items() if count}
