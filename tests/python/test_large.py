"""Multiplies of more than 2^31 elements on a GPU: weights (up to 2^33, 2^32 packed bytes), operands and results.

Outputs next to the boundaries, where an offset of 32 bits would turn over, are compared with float64.
"""

import pytest
import torch

import nybble
from nybble.gate import room
from nybble.gate.dispatch import plan_of
from nybble.gate.multiply import FORWARD, GRAD_INPUT, Weight, exact_multiply, moved, multiply
from nybble.quant_state import nested_table, table

from .conftest import has_gpu
from .reference import dequantised, quantised

pytestmark = pytest.mark.skipif(not has_gpu(), reason="no GPU, or nybble was built without CUDA")

GIB = 1 << 30
BOUNDARIES = (1 << 31, 1 << 32, 1 << 33)  # elements; of packed bytes twice as many elements
BLOCK, WINDOW = 64, 64
LIMIT = 2**-6  # see worst(): bfloat16 rounds to 2^-9 of a value, one wrong block of 64 in a row of 32832 gives 2^-4.5
MANY = 140_000  # rows
SMALL_M_TAKES, HOPPER_TAKES = (300_032, 28_672), (262_176, 32_832)  # n, k of more than 2^33 weights


@pytest.fixture(autouse=True)
def memory_goes_back():
    yield
    torch.cuda.empty_cache()


def require(gib):
    device = torch.device("cuda", torch.cuda.current_device())
    free = room.available(device)
    if not room.fits(gib * GIB, free):
        pytest.skip(room.why(gib * GIB, free))
    return device


def random_bytes(count, device):
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)


def random_packed(n, k, device):
    """W [n, k] of random codes and random nested scales; nothing dense is made."""
    blocks = n * k // BLOCK
    nested_absmax = torch.rand(-(-blocks // 256), device=device) * 0.02 + 0.01
    state = nybble.QuantState(
        random_bytes(blocks, device),
        torch.Size((n, k)),
        table("nf4", device),
        BLOCK,
        "nf4",
        torch.bfloat16,
        torch.tensor(0.04, device=device),
        nybble.QuantState(nested_absmax, None, nested_table(device), 256, None, torch.float32),
    )
    return Weight(random_bytes(n * k // 2, device).view(-1, 1), state)


def part(weight, rows, columns):
    """W[rows, columns] in float64, rounded to bfloat16, from the definition. columns: a slice of whole blocks."""
    state, blocks = weight.state, weight.k // BLOCK
    packed = weight.packed.view(weight.n, -1)[rows, columns.start // 2 : columns.stop // 2]
    codes = torch.stack((packed >> 4, packed & 15), dim=-1).flatten(1).long()
    of = slice(columns.start // BLOCK, columns.stop // BLOCK)
    index = torch.arange(weight.n, device=packed.device)[rows, None] * blocks
    index = index + torch.arange(blocks, device=packed.device)[of]
    scales = state.state2.code[state.absmax.view(weight.n, -1)[rows, of].long()] * state.state2.absmax[index // 256]
    scales = (scales + state.offset).repeat_interleave(BLOCK, dim=1)
    return (state.code[codes] * scales).bfloat16().double()


def crossings(weight):
    """(row, column) of the weights with which a boundary is reached."""
    return [divmod(boundary, weight.k) for boundary in BOUNDARIES if boundary < weight.n * weight.k]


def rows_to_see(weight):
    near = {row + step for row, _ in crossings(weight) for step in (-1, 0, 1)}
    return sorted(near | {0, weight.n - 1} | set(range(0, weight.n, weight.n // 64)))


def columns_to_see(weight):
    starts = {0, weight.k - BLOCK} | {column // BLOCK * BLOCK for _, column in crossings(weight)}
    return [slice(start, start + BLOCK) for start in sorted(starts)]


def seen(weight, direction):
    """Indices of the outputs that are compared."""
    if direction == FORWARD:
        return rows_to_see(weight)
    return [column for columns in columns_to_see(weight) for column in range(columns.start, columns.stop)]


def exact(weight, direction, operand):
    """The product's columns `seen`, in float64. operand: a few rows."""
    every_row, every_column = slice(0, weight.n), slice(0, weight.k)
    if direction == FORWARD:
        dense = torch.cat([part(weight, slice(row, row + 1), every_column) for row in rows_to_see(weight)])
        return operand.double() @ dense.t()
    return torch.cat([operand.double() @ part(weight, every_row, columns) for columns in columns_to_see(weight)], 1)


def worst(found, expected):
    """The error of the worst column over the tokens, in sizes of an average column. NaN is below no limit."""
    size = expected.norm() / expected.shape[1] ** 0.5
    return float(((found.double() - expected).norm(dim=0) / size).max())


def operands(weight, m, direction, dtype=torch.bfloat16):
    """Random ones; for grad_y also random only next to the ends and boundaries, where a row then weighs much."""
    dense = torch.randn(m, weight.columns(direction)[0], dtype=dtype, device=weight.packed.device)
    if direction == FORWARD:
        return [dense]
    near = torch.zeros_like(dense)
    for middle in (0, weight.n, *(row for row, _ in crossings(weight))):
        window = slice(max(0, middle - WINDOW // 2), middle + WINDOW // 2)
        near[:, window] = dense[:, window]
    return [dense, near]


def check(weight, m, direction, path, mode="auto", dtype=torch.bfloat16):
    if "H200" not in torch.cuda.get_device_name() and mode == "auto" and path != "dequant":
        path = plan_of(weight, m, direction).path  # other cards plan otherwise; what runs must still be that
    tokens = sorted({0, m // 2, m - 1})
    for operand in operands(weight, m, direction, dtype):
        before = nybble.path_counters()
        found = multiply(direction, operand, weight, mode)
        assert set(moved(before, nybble.path_counters())) == {f"{path}.{direction}"}
        assert found.shape == (m, weight.columns(direction)[1])
        assert worst(found[tokens][:, seen(weight, direction)], exact(weight, direction, operand[tokens])) < LIMIT


@pytest.mark.parametrize(
    ("shape", "m", "forward", "grad_x"),
    [
        (SMALL_M_TAKES, 1, "small_m", "small_m"),  # strips
        (SMALL_M_TAKES, 16, "small_m", "small_m"),
        (SMALL_M_TAKES, 64, "hopper", "small_m"),
        (SMALL_M_TAKES, 200, "hopper", "hopper"),  # row pairs
        (HOPPER_TAKES, 1, "row", "row"),
        (HOPPER_TAKES, 8, "portable", "portable"),
        (HOPPER_TAKES, 300, "hopper", "hopper"),
        (HOPPER_TAKES, 2048, "hopper", "hopper"),
    ],
    ids=str,
)
def test_fused_multiplies_by_more_than_2_to_33_weights(shape, m, forward, grad_x):
    weight = random_packed(*shape, require(9))
    assert len(crossings(weight)) == 3
    check(weight, m, FORWARD, forward)
    check(weight, m, GRAD_INPUT, grad_x)


@pytest.mark.parametrize("direction", [FORWARD, GRAD_INPUT])
@pytest.mark.parametrize("boundary", range(3))
def test_a_changed_block_of_codes_at_a_boundary_is_seen(boundary, direction):
    weight = random_packed(*SMALL_M_TAKES, require(7))
    operand = operands(weight, 16, direction)[-1]
    expected = exact(weight, direction, operand)
    row, column = crossings(weight)[boundary]
    first = (row * weight.k + column // BLOCK * BLOCK) // 2
    weight.packed[first : first + BLOCK // 2] ^= 0x44
    assert worst(multiply(direction, operand, weight)[:, seen(weight, direction)], expected) > LIMIT


def test_more_than_2_to_32_weights_are_dequantised():
    n, k = 131_088, 32_832
    weight = random_packed(n, k, require(11))
    assert len(crossings(weight)) == 2
    dense = nybble.dequantize_4bit(weight.packed, weight.state)
    assert dense.shape == (n, k)
    for row in rows_to_see(weight):
        assert torch.equal(dense[row : row + 1].double(), part(weight, slice(row, row + 1), slice(0, k)))
    del dense
    for direction in (FORWARD, GRAD_INPUT):
        check(weight, 16, direction, "dequant", mode="dequant")


def test_fp32_activations_meet_more_than_2_to_33_weights():
    weight = random_packed(*HOPPER_TAKES, require(7))
    for direction in (FORWARD, GRAD_INPUT):
        check(weight, 16, direction, "dequant", dtype=torch.float32)


@pytest.mark.parametrize("direction", [FORWARD, GRAD_INPUT])
@pytest.mark.parametrize("wide", ["operand", "result"])
@pytest.mark.parametrize(
    ("path", "mode", "narrow", "wide_columns", "block"),
    [
        ("hopper", "auto", 256, 16_384, 64),
        ("portable", "fused", 320, 16_448, 128),  # blocks that do not divide a row
        ("dequant", "dequant", 256, 16_384, 64),
    ],
    ids=["hopper", "portable", "dequant"],
)
def test_an_operand_or_a_result_of_more_than_2_to_31_elements(path, mode, narrow, wide_columns, block, wide, direction):
    device = require(10)
    columns = (wide_columns, narrow) if wide == "operand" else (narrow, wide_columns)
    n, k = columns[::-1] if direction == FORWARD else columns
    weight = Weight(*quantised(n, k, blocksize=block, device=device))
    of_operand, of_result = weight.columns(direction)
    widest = max(of_operand, of_result)
    assert MANY * widest > 1 << 31
    operand = torch.randn(MANY, of_operand, dtype=torch.bfloat16, device=device)
    before = nybble.path_counters()
    result = multiply(direction, operand, weight, mode)
    ran = set(moved(before, nybble.path_counters()))
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert ran == {f"{path}.{direction}"} or (path == "hopper" and not hopper and len(ran) == 1)
    rows = sorted({0, 1, MANY // 2, MANY - 1} | {b // widest + s for b in (1 << 30, 1 << 31) for s in (-1, 0, 1)})
    few = torch.stack([operand[row] for row in rows])
    expected = exact_multiply(direction, few, dequantised(weight.packed, weight.state)).t()
    found = torch.stack([result[row] for row in rows]).t()
    assert worst(found, expected) < LIMIT < worst(found.flip(1), expected)
    if path == "dequant" or not hopper:
        return
    del result
    whole = multiply(direction, operand, weight, mode, batch_invariant=True)  # every row, by its bits in a smaller call
    for first in range(0, MANY, 16_384):
        rows = slice(first, first + 16_384)
        assert torch.equal(multiply(direction, operand[rows], weight, mode, batch_invariant=True), whole[rows]), first
