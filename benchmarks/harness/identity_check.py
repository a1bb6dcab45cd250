"""Whether a kernel multiplies by exactly the dequantised weight: of an identity input, every product, bit for bit.

Each output is one weight plus zeros, so sums in any order, whole or cut, give its bits (of a zero, either sign).
Used by portable_check.py.
"""

import itertools
from dataclasses import dataclass

import torch
from hopper_plans import AUTO_GROUP, ROW_PAIRS, variant
from hopper_plans import TILES as HOPPER_TILES
from portable_kernels import HOPPER, PORTABLE, ROW, SMALL_M, TILES

GUARD = 64  # elements before each output and behind the last: 128 bytes, so that outputs stay aligned
FLIP = 0x40  # changes one value of either type to another
BOTH, FORWARD, GRAD_X = (0, 1), (0,), (1,)
DTYPES = (torch.bfloat16, torch.float16)
SMALL_M_SIZES, STRIP, UNIT = (8, 16, 32, 64, 128), 5, 256  # small_m.h, small_m_work.h
WHOLE_TILES = 112 * UNIT  # outputs: a tile for each CTA of 114 or 132, so that no sum is cut


@dataclass(frozen=True)
class Arm:
    """One way to multiply. plan: how the text of its plans must begin."""

    options: dict
    tokens: int | None  # of a call, None: all
    plan: str
    split: bool | None = None  # whether the plan must cut sums into pieces


@dataclass(frozen=True)
class Group:
    weight: dict  # arguments of Weight
    directions: tuple
    arms: tuple
    controls: bool = False  # whether a flipped bit must be seen, too


def portable_arms():
    tiles = [(v, cut) for v in TILES for cut in (0, 1)]
    arms = [Arm(dict(path=PORTABLE, variant=v, cut=cut), 512, f"portable variant {v}, ") for v, cut in tiles]
    return (*arms, Arm(dict(path=ROW), 8, "row variant 8, "))


def hopper_arms():
    """Every tile, schedule and way of the scales. Whole: all tokens in one call; cut: two tiles of tokens."""
    arms = []
    for (tile, name), schedule, scales in itertools.product(enumerate(HOPPER_TILES), range(3), range(2)):
        if tile in ROW_PAIRS and scales == 0:
            continue  # they make their scales in the kernel only
        number = variant(tile, schedule, scales)
        options = dict(path=HOPPER, variant=number, cut=AUTO_GROUP)
        tokens = 2 * int(name.removeprefix("rows")) if schedule else None
        arms.append(Arm(options, tokens, f"hopper variant {number}, "))
    return tuple(arms)


def small_m_arms(split):
    return tuple(
        Arm(dict(path=SMALL_M), tokens, f"small_m variant {number}, ", split)
        for number, tokens in enumerate(SMALL_M_SIZES)
    )


def strip_arms(tokens, split):
    return (Arm(dict(path=SMALL_M, variant=STRIP), tokens, f"small_m variant {STRIP}, ", split),)


def kinds(blocks=(64,), nested=(True, False)):
    names = ("quant_type", "nested", "block")
    return [dict(zip(names, kind, strict=True)) for kind in itertools.product((0, 1), nested, blocks)]


def groups_of_any_card():
    for number, kind in enumerate(kinds((64, 128))):  # 17 x 64 columns: blocks of 128 reach into the next row
        yield Group(dict(n=1032, k=1088) | kind, BOTH, portable_arms(), controls=number == 0)


def groups_of_hopper():
    """What only compute capability 9.0 has."""
    # k: 17 blocks of 64 in a row; a multiple of 4, whose scales come a unit of steps, or as boxes; of 16, whose codes
    # come as boxes or runs.
    scales = [(1088, 64, True), (1280, 64, True), (1024, 64, True), (1280, 256, True)]
    scales += [(1088, 64, False), (1280, 64, False), (1280, 256, False)]
    for number, (k, block, nested) in enumerate(scales):
        for kind in kinds((block,), (nested,)):
            yield Group(dict(n=1032, k=k) | kind, BOTH, hopper_arms(), controls=number + kind["quant_type"] == 0)
    for kind in kinds():
        first = kind == kinds()[0]
        yield Group(dict(n=2 * UNIT, k=1024) | kind, BOTH, small_m_arms(True), first)
        yield Group(dict(n=WHOLE_TILES, k=1024) | kind, FORWARD, small_m_arms(False), first)
        yield Group(dict(n=2 * UNIT, k=WHOLE_TILES) | kind, GRAD_X, small_m_arms(False), first)
    for kind in kinds(nested=(True,)):
        first = kind == kinds()[0]
        yield Group(dict(n=1024, k=4096) | kind, FORWARD, strip_arms(8, False), first)
        yield Group(dict(n=1024, k=5376) | kind, FORWARD, strip_arms(8, False))  # 21 slices for 16 warps
        yield Group(dict(n=512, k=8192) | kind, FORWARD, strip_arms(8, True), first)
        yield Group(dict(n=1024, k=4096) | kind, GRAD_X, strip_arms(4, True), first)
        yield Group(dict(n=512, k=WHOLE_TILES) | kind, GRAD_X, strip_arms(4, False), first)


def groups_of(sm):
    return [*groups_of_any_card(), *(groups_of_hopper() if sm == 90 else ())]


def plan_is_meant(text, arm):
    """Empty, or what is wrong with a plan."""
    split = ", split 1, " not in text
    if text.startswith(arm.plan) and arm.split in (None, split):
        return ""
    return f"expected {arm.plan}split: {arm.split}, the plan is {text}"


def multiply_identity(kernels, weight, direction, dtype, arm):
    """(products [rows, columns], elements wrong outside them). RuntimeError for a plan that is not the arm's."""
    reduction, columns = (weight.n, weight.k) if direction else (weight.k, weight.n)
    device = weight.packed.device
    identity = torch.eye(reduction, dtype=dtype, device=device)
    tokens = min(arm.tokens or reduction, reduction)
    starts = range(0, reduction, tokens)
    memory = torch.full((len(starts) * (GUARD + tokens * columns) + GUARD,), 77.0, dtype=dtype, device=device)
    body = memory[:-GUARD].view(len(starts), -1)
    body[:, GUARD:] = float("nan")
    for number, first in enumerate(starts):
        x = identity[first : first + tokens]
        out = body[number, GUARD : GUARD + x.shape[0] * columns].view(-1, columns)
        c = kernels.call(weight, x, out, direction, **arm.options)
        if wrong := plan_is_meant(kernels.plan(c), arm):
            raise RuntimeError(wrong)
        kernels.run(c)
    products = body[:, GUARD:].reshape(-1, columns)
    outside = (body[:, :GUARD] != 77).sum() + (memory[-GUARD:] != 77).sum() + (~products[reduction:].isnan()).sum()
    return products[:reduction], int(outside)


def check_identity(kernels, weight, dense, direction, dtype, arm):
    """Empty, or what is wrong. dense: W [n, k] in dtype."""
    products, outside = multiply_identity(kernels, weight, direction, dtype, arm)
    wrong = int((products != (dense if direction else dense.t())).sum())
    if outside:
        return f"wrote {outside} elements outside its output"
    return f"{wrong} of {dense.numel()} weights wrong" if wrong else ""


def check_flip(kernels, weight, dense, direction, dtype, arm):
    """The control: with one bit of a code flipped, exactly that weight is wrong. Empty, or what was seen instead."""
    at = weight.packed.numel() // 3
    weight.packed[at] ^= FLIP
    seen = check_identity(kernels, weight, dense, direction, dtype, arm)
    weight.packed[at] ^= FLIP
    expected = f"1 of {dense.numel()} weights wrong"
    return "" if seen == expected else f"of a flipped bit was seen: {seen or 'nothing'}"


def check_group(kernels, weight, group):
    """(checks, [(arm, direction, dtype, what is wrong)])"""
    checks, failures = 0, []
    for dtype in DTYPES:
        dense = weight.dense(dtype)
        controls = group.controls and dtype == DTYPES[0]
        tests = (check_identity, check_flip) if controls else (check_identity,)
        for direction, arm, test in itertools.product(group.directions, group.arms, tests):
            checks += 1
            try:
                wrong = test(kernels, weight, dense, direction, dtype, arm)
            except RuntimeError as error:
                wrong = str(error)
            if wrong:
                failures.append((arm.options, direction, str(dtype), wrong))
    return checks, failures
