"""How far two results of one multiply are apart, in the units in which the gate judges."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10}
UNIT = 2.0**-24  # of fp32 sums


@contextlib.contextmanager
def sums_in_fp32() -> Iterator[None]:
    """cuBLAS adds the pieces of a split sum in fp32 for the block. torch lets it add them in the operands' dtype, which
    on an H200 made y of [16384, 999] by [257, 999] thousands of units of sum_excess() wrong.
    """
    flags = torch.backends.cuda.matmul
    names = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"
    before = {name: getattr(flags, name) for name in names}
    for name in names:
        setattr(flags, name, False)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(flags, name, value)


@dataclass(frozen=True)
class Difference:
    """Two results in the same 16-bit dtype."""

    max_abs: float
    max_ulp: int
    equal_share: float


def difference(a: torch.Tensor, b: torch.Tensor) -> Difference:
    """max_ulp counts representable values between a and b, so it needs no scale. Only the elements that differ are
    looked at twice: most results have few of them, and results have up to half a billion elements.
    """
    if a.numel() == 0 or a.shape != b.shape:
        raise ValueError(f"shapes {list(a.shape)} and {list(b.shape)}, expected the same, not empty")
    a, b = a.reshape(-1), b.reshape(-1)
    where = (a != b).nonzero().view(-1)  # NaN differs from everything
    if where.numel() == 0:
        return Difference(0.0, 0, 1.0)
    left, right = a[where], b[where]
    worst, steps = torch.stack(
        ((left.double() - right.double()).abs().max(), (ordered(left) - ordered(right)).abs().max().double())
    ).tolist()
    return Difference(worst, int(steps), (a.numel() - where.numel()) / a.numel())


def ordered(value: torch.Tensor) -> torch.Tensor:
    """int32 that grows by one from each representable 16-bit float to the next."""
    bits = value.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -32768 - bits, bits)


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the error by the norm of the exact result; inf for anything that is not a number."""
    error = ((value.double() - exact).norm() / exact.norm()).item()
    return error if error == error else float("inf")


def half_ulp(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the spacing of dtype at each exact value (float64), never below that of the smallest normal one."""
    smallest = torch.finfo(dtype).smallest_normal
    _, exponent = torch.frexp(exact.abs().clamp_min(smallest))
    return torch.ldexp(torch.ones_like(exact), exponent - 2 - _MANTISSA_BITS[dtype])


def sum_excess(value: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor) -> float:
    """The worst element's error beyond the rounding of the result, in units of 2^-24 times |row of x| |row of W|.

    An fp32 sum of K products in any sane order stays within a few units; one wrong weight does not. scale: the
    products of norms, [m, columns]. inf for anything that is not a number.
    """
    beyond = (value.double() - exact).abs() - half_ulp(exact, value.dtype)
    worst = (beyond / (scale * UNIT)).max().item()
    return max(worst, 0.0) if worst == worst else float("inf")
