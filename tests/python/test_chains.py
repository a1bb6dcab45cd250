"""Chains of multiplies that overlap on one stream have the bits of the same chain with a wait behind every launch.

Kernels of the multiply start before those in front of them are complete. Here each one's output feeds the next, alone
and with torch's own matmul between, eager (queued behind a sleep, so that nothing waits for the host) and in a graph.
"""

import re

import pytest
import torch

from nybble.gate.dispatch import plan_of
from nybble.gate.multiply import FORWARD, GRAD_INPUT, Weight, multiply, random_operand, random_weight

from .conftest import has_gpu

pytestmark = pytest.mark.skipif(not has_gpu(), reason="no GPU, or nybble was built without CUDA")

CUDA = torch.device("cuda")
REPEATS, BATCH, INPUTS = 200, 20, 3  # BATCH is even: the last test turns a weight to and fro
SLEEP = 20_000_000  # clocks, more than the host takes for a batch
HOPPER, ROW_PAIRS = "Hopper kernel", "tiles of 256 rows by"
# Size of a square weight, rows, and what the plan on an H200 says, forward and grad_x.
CASES = [
    *[(4096, m, "strips of", "bands of") for m in (1, 2, 3, 4)],
    *[(4096, m, "strips of", "partial sums added") for m in (5, 6, 7, 8)],
    (4096, 16, "partial sums added", "partial sums added"),
    (8192, 48, "partial sums added", "partial sums added"),  # x put in order by a kernel before
    (4096, 96, ROW_PAIRS, ROW_PAIRS),
    (4096, 256, HOPPER, HOPPER),
    (11264, 128, "stream-K", "stream-K"),
    (4096, 1024, "128 rows by", "128 rows by"),
]


class Chain:
    """forward, forward, torch, grad_x, grad_x, torch, forward: returns what each of them gave."""

    def __init__(self, size: int):
        self.weights = [random_weight(size, size, CUDA, seed) for seed in (1, 2)]
        self.dense = random_operand(size, size, CUDA, 3) * size**-0.5

    def __call__(self, x: torch.Tensor, wait: bool = False) -> list[torch.Tensor]:
        outputs = []
        for step in ("forward 0", "forward 1", "torch", "grad_input 1", "grad_input 0", "torch", "forward 1"):
            if step == "torch":
                x = torch.mm(x, self.dense)
            else:
                direction, number = step.split()
                x = multiply(direction, x, self.weights[int(number)])
            outputs.append(x)
            if wait:
                torch.cuda.synchronize()
        return outputs

    def expected(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self(x, wait=True)


def with_another_bit(x: torch.Tensor) -> torch.Tensor:
    """x with the last bit of its largest element flipped."""
    bits = x.clone().view(torch.int16).view(-1)
    bits[x.abs().argmax()] ^= 1
    return bits.view(torch.bfloat16).view_as(x)


def wrong(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> int:
    """How many runs differ in any output from what is expected of their input."""
    differs = torch.zeros(len(found), dtype=torch.bool, device=CUDA)
    for step in range(len(found[0])):
        got = torch.stack([outputs[step] for outputs in found])
        want = torch.stack([expected[i % len(expected)][step] for i in range(len(found))])
        differs |= (got.view(torch.int16) != want.view(torch.int16)).flatten(1).any(1)
    return int(differs.sum())


def poison(outputs) -> None:
    for output in outputs:
        output.fill_(float("nan"))


def takes(size: int, m: int, words: tuple[str, str], weight: Weight) -> None:
    for direction, word in zip((FORWARD, GRAD_INPUT), words, strict=True):
        plan = plan_of(weight, m, direction).text
        assert torch.cuda.get_device_capability() != (9, 0) or re.search(word, plan), plan


def inputs_and_expected(chain, size, m):
    """Inputs, what is expected of each, and the same with one bit of each input flipped."""
    inputs = [random_operand(m, size, CUDA, seed) for seed in range(INPUTS)]
    changed = [chain.expected(with_another_bit(x)) for x in inputs]
    return inputs, [chain.expected(x) for x in inputs], changed


@pytest.mark.parametrize(("size", "m", "forward", "grad_x"), CASES)
def test_a_queued_chain_has_the_bits_of_one_that_waits(size, m, forward, grad_x):
    chain = Chain(size)
    takes(size, m, (forward, grad_x), chain.weights[0])
    inputs, expected, changed = inputs_and_expected(chain, size, m)
    for first in range(0, REPEATS, BATCH):
        torch.cuda._sleep(SLEEP)
        found = [chain(inputs[i % INPUTS]) for i in range(BATCH)]
        assert wrong(found, expected) == 0, f"of the runs from {first} on"
        assert wrong(found, changed) == BATCH
        for outputs in found:
            poison(outputs)


@pytest.mark.parametrize(("size", "m", "forward", "grad_x"), CASES)
def test_a_captured_chain_has_the_bits_of_one_that_waits(size, m, forward, grad_x):
    chain = Chain(size)
    takes(size, m, (forward, grad_x), chain.weights[0])
    inputs, expected, changed = inputs_and_expected(chain, size, m)
    x = inputs[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = chain(x)
    for first in range(0, REPEATS, BATCH):
        found = []
        for i in range(BATCH):
            x.copy_(inputs[i % INPUTS])
            poison(outputs)
            graph.replay()
            found.append([output.clone() for output in outputs])
        assert wrong(found, expected) == 0, f"of the replays from {first} on"
        assert wrong(found, changed) == BATCH


@pytest.mark.parametrize("direction", [FORWARD, GRAD_INPUT])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(("size", "m"), [(4096, 1), (4096, 4), (8192, 48), (4096, 192), (4096, 1024)])
def test_a_weight_that_a_kernel_has_just_written_is_read_as_written(size, m, nested, direction):
    weight = random_weight(size, size, CUDA, 1, nested=nested)
    if m == 192:
        takes(size, m, (ROW_PAIRS, ROW_PAIRS), weight)
    absmax = weight.state.absmax if nested else weight.state.absmax.view(torch.int32)
    parts = weight.packed, absmax
    # Bytes turn into any others, floats change their fraction.
    turns = [
        torch.randint(0, 256 if part.dtype == torch.uint8 else 1 << 23, part.shape, dtype=part.dtype, device=CUDA)
        for part in parts
    ]
    x = random_operand(m, size, CUDA, 2)

    def turn_and_multiply():
        for part, other in zip(parts[::-1], turns[::-1], strict=True):  # the packed bytes last
            torch.bitwise_xor(part, other, out=part)
        return [multiply(direction, x, weight)]

    expected = []
    for _ in range(2):
        expected += [turn_and_multiply()]
        torch.cuda.synchronize()
    for first in range(0, REPEATS, BATCH):
        torch.cuda._sleep(SLEEP)
        found = [turn_and_multiply() for _ in range(BATCH)]
        assert wrong(found, expected) == 0, f"of the runs from {first} on"
        assert wrong(found, expected[::-1]) == BATCH
        for outputs in found:
            poison(outputs)
