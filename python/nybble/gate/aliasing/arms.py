"""The multiplies that the gate compares: y = x @ W.T on a weight that lies in a recycled slot."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

import nybble
from nybble.errors import translate
from nybble.gate.aliasing.layers import BLOCK, FIELDS, Weight4Bit
from nybble.gate.aliasing.patterns import Keeps
from nybble.quant_state import DTYPE_CODES, MODE_CODES, QUANT_TYPE_CODES


class Multiply(Protocol):
    """x [..., K], a weight [N, K] -> [..., N] in x's dtype."""

    def __call__(self, x: torch.Tensor, weight: Any) -> torch.Tensor: ...


class Copies(Enum):
    """What of an acquired layer an arm copies out of the slot before it computes. An op that keeps its weight on ctx
    is cured exactly by copies of what it keeps, made when it keeps it.
    """

    NONE = "none"
    FORWARD = "all, in the first forward"
    RECOMPUTE = "all, in the recompute"
    QUANTISED = "packed weights and scales, in the first forward"
    REST = "norms, in the first forward"

    def of(self, layer: dict[str, Any], recompute: bool) -> dict[str, Any]:
        """The layer's weights and vectors, copied where this says so."""
        if self is Copies.NONE or recompute != (self is Copies.RECOMPUTE):
            return layer
        return {name: self._copied(value) for name, value in layer.items()}

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Weight4Bit):
            parts = {} if self is Copies.REST else {field: getattr(value, field).clone() for field in FIELDS}
            return dataclasses.replace(value, **parts)
        return value if self is Copies.QUANTISED else value.clone()


@dataclass(frozen=True)
class AliasingArm:
    """One column of the gate's table."""

    name: str
    role: str  # product, native or control (nybble.gate.runner.Role)
    multiply: Multiply
    keeps: Keeps
    checks: bool = False  # the ring tells nybble who owns a slot, and the op asks
    counted: bool = False  # runs nybble's C++ op, whose launches are counted
    dense: bool = False
    copies: Copies = Copies.NONE
    not_run: str | None = None  # why this arm is left out


def native(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """torch's own linear on the dense weight: saves it through autograd."""
    return torch.nn.functional.linear(x, weight)


def product(x: torch.Tensor, weight: Weight4Bit) -> torch.Tensor:
    """nybble's op: every tensor of the weight goes through save_for_backward."""
    return nybble.nf4_linear(
        x,
        weight.packed,
        weight.absmax,
        weight.shape,
        code=weight.code,
        blocksize=BLOCK,
        nested_absmax=weight.nested_absmax,
        nested_code=weight.nested_code,
        offset=weight.offset,
        guard=weight.uid,
    )


def bitsandbytes(x: torch.Tensor, weight: Weight4Bit) -> torch.Tensor:
    """bitsandbytes' MatMul4Bit, as it is installed."""
    from bitsandbytes import matmul_4bit
    from bitsandbytes.functional import QuantState

    nested = QuantState(absmax=weight.nested_absmax, code=weight.nested_code, blocksize=256, dtype=torch.float32)
    state = QuantState(
        absmax=weight.absmax,
        shape=torch.Size(weight.shape),
        code=weight.code,
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=weight.dtype,
        offset=weight.offset,
        state2=nested,
    )
    return matmul_4bit(x, weight.packed.t(), quant_state=state)


def launch_forward(x: torch.Tensor, weight: Weight4Bit) -> torch.Tensor:
    """nybble's forward kernel without autograd."""
    try:
        return torch.ops.nybble.linear_4bit(x, *_tensors(weight), None, weight.uid, *_spec(weight))
    except RuntimeError as error:
        raise translate(error) from None


def launch_backward(grad_y: torch.Tensor, weight: Weight4Bit) -> torch.Tensor:
    """nybble's grad_x kernel without autograd."""
    try:
        return torch.ops.nybble.linear_4bit_grad_input(grad_y, *_tensors(weight), weight.uid, *_spec(weight))
    except RuntimeError as error:
        raise translate(error) from None


def _tensors(weight: Weight4Bit) -> tuple[torch.Tensor, ...]:
    return weight.packed, weight.absmax, weight.code, weight.nested_absmax, weight.nested_code, weight.offset


def _spec(weight: Weight4Bit) -> tuple:
    n, k = weight.shape
    dtypes = DTYPE_CODES[weight.dtype], DTYPE_CODES[torch.float32]
    return n, k, BLOCK, QUANT_TYPE_CODES["nf4"], *dtypes, MODE_CODES["auto"], False


class WeightOnCtx(torch.autograd.Function):
    """nybble's kernels in the unsafe shape: the whole weight is a plain attribute of ctx."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: Weight4Bit) -> torch.Tensor:
        ctx.weight = weight
        return launch_forward(x, weight)

    @staticmethod
    def backward(ctx, grad_y: torch.Tensor):
        return launch_backward(grad_y, ctx.weight), None


class ScalesOnCtx(torch.autograd.Function):
    """nybble's kernels in the half-safe shape: packed is saved, its scales are attributes of ctx."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, packed: torch.Tensor, weight: Weight4Bit) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.weight = weight
        return launch_forward(x, weight)

    @staticmethod
    def backward(ctx, grad_y: torch.Tensor):
        (packed,) = ctx.saved_tensors
        fields = {**vars(ctx.weight), "packed": packed}
        return launch_backward(grad_y, Weight4Bit(**fields)), None, None


def weight_on_ctx(x: torch.Tensor, weight: Weight4Bit) -> torch.Tensor:
    return WeightOnCtx.apply(x, weight)


def scales_on_ctx(x: torch.Tensor, weight: Weight4Bit) -> torch.Tensor:
    return ScalesOnCtx.apply(x, weight.packed, weight)
