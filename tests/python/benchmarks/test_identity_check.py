"""The identity check without a GPU: which faults of a kernel it sees, and that every kernel has its turn."""

import ctypes
import os
import pathlib
import sys

import pytest
import torch

HARNESS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks" / "harness"
sys.path.insert(0, str(HARNESS))
import hopper_plans as plans  # noqa: E402
import identity_check as check  # noqa: E402
import portable_check as portable  # noqa: E402
from portable_kernels import HOPPER, ROW, SMALL_M, Kernels, Weight  # noqa: E402

ARM = check.Arm(dict(path=ROW), 24, "row variant 8, ")
N, K = 40, 64


class DenseKernels:
    """Stands for the library: multiplies on the CPU, with a fault if it is given one."""

    sm = 80

    def __init__(self, fault=None, plan="row variant 8, split 1, "):
        self.fault, self.text, self.first = fault, plan, None

    def call(self, weight, x, out, direction, **options):
        return weight, x, out, direction

    def plan(self, call):
        return self.text

    def run(self, call):
        weight, x, out, direction = call
        dense = weight.dense(x.dtype)
        self.first = dense if self.first is None else self.first
        out[:] = x @ ((self.first if self.fault == "ignores the weight" else dense) if direction else dense.t())
        if self.fault == "leaves the last product out":
            out[-1, -1] = float("nan")
        if self.fault == "writes behind its output":
            out.as_strided((1,), (1,), out.storage_offset() + out.numel())[0] = 0
        if self.fault == "writes before its output":
            out.as_strided((1,), (1,), out.storage_offset() - 1)[0] = 0


def found(kernels, direction, test=check.check_identity, **arguments):
    weight = Weight(N, K, device="cpu", **arguments)
    return test(kernels, weight, weight.dense(torch.bfloat16), direction, torch.bfloat16, ARM)


@pytest.mark.parametrize("direction", check.BOTH)
@pytest.mark.parametrize("kind", check.kinds((64, 128)), ids=str)
def test_an_exact_multiply_passes_and_a_flipped_bit_of_its_weight_is_seen(kind, direction):
    assert found(DenseKernels(), direction, **kind) == ""
    assert found(DenseKernels(), direction, check.check_flip, **kind) == ""


@pytest.mark.parametrize("direction", check.BOTH)
def test_a_product_left_out_and_a_write_outside_are_seen(direction):
    chunks = -(-(N if direction else K) // ARM.tokens)
    assert found(DenseKernels("leaves the last product out"), direction) == f"{chunks} of {N * K} weights wrong"
    for fault in ("writes behind its output", "writes before its output"):
        assert f"wrote {chunks} elements outside" in found(DenseKernels(fault), direction)


def test_a_kernel_that_ignores_its_weight_fails_the_control():
    kernels, weight = DenseKernels("ignores the weight"), Weight(N, K, device="cpu")
    arguments = (kernels, weight, weight.dense(torch.bfloat16), 1, torch.bfloat16, ARM)
    assert check.check_identity(*arguments) == ""
    assert check.check_flip(*arguments) == "of a flipped bit was seen: nothing"


def test_another_plan_than_the_arm_s_is_a_failure():
    group = check.Group(dict(n=N, k=K), check.BOTH, (ARM,), controls=True)
    checks, failures = check.check_group(DenseKernels(), Weight(**group.weight, device="cpu"), group)
    assert (checks, failures) == (6, [])
    checks, failures = check.check_group(DenseKernels(plan="portable"), Weight(**group.weight, device="cpu"), group)
    assert checks == len(failures) == 6 and "expected row variant 8, " in failures[0][-1]
    cut = check.Arm({}, 8, "row", split=True)
    assert check.plan_is_meant("row, split 2, ", cut) == "" != check.plan_is_meant("row, split 1, ", cut)


def test_groups_after_the_time_are_skipped_and_failures_are_counted(monkeypatch):
    groups = [check.Group(dict(n=N, k=K, device="cpu"), check.BOTH, (ARM,))] * 3
    monkeypatch.setattr(portable, "groups_of", lambda sm: groups)
    result = portable.check_identities(DenseKernels("leaves the last product out"), iter((False, True, True)).__next__)
    assert (result["cases"], len(result["failures"]), result["skipped"]) == (4, 4, 2)


def test_every_kernel_is_checked_in_both_directions_with_every_kind_of_scales_and_has_a_control():
    groups = check.groups_of(90)
    assert {arm.options["path"] for group in check.groups_of(89) for arm in group.arms}.isdisjoint({HOPPER, SMALL_M})
    hopper = {arm.options["variant"] for group in groups for arm in group.arms if arm.options["path"] == HOPPER}
    assert len(hopper) == (3 * 2 + 6) * len(plans.SCHEDULES)
    seen, controlled = {}, set()
    for group in groups:
        kind = (group.weight["quant_type"], group.weight["nested"], group.weight["block"] == 64)
        for arm in group.arms:
            for direction in group.directions:
                name = (arm.plan, arm.split, direction)
                seen.setdefault(name, set()).add(kind)
                controlled |= {name} if group.controls else set()
    for (plan, split, direction), found_kinds in seen.items():
        scales = {(kind[0], kind[1]) for kind in found_kinds}
        assert len(scales) == (2 if plan.startswith(f"small_m variant {check.STRIP},") else 4), (plan, direction)
        assert plan.startswith("small_m") or len(found_kinds) == 8, plan
        assert {(plan, split, 0), (plan, split, 1)} <= set(seen)
    assert controlled == set(seen)


@pytest.mark.parametrize("sms", [132, 114])
def test_every_plan_is_the_one_that_its_arm_names(sms):
    library = pathlib.Path(os.environ.get("NYBBLE_BUILD_DIR", "")) / "benchmarks/cuda/libportable_bench.so"
    if not library.exists():
        pytest.skip(f"no {library}; cmake --build BUILD --target portable_bench")
    kernels = Kernels.__new__(Kernels)  # without a GPU: plans only
    kernels.library, kernels.sm, kernels.sms = ctypes.CDLL(str(library)), 90, sms
    kernels.workspace = torch.empty(32 << 20, dtype=torch.uint8)
    wrong, planned = [], 0
    for group in check.groups_of(90):
        weight = Weight(**(group.weight | dict(n=8, k=64)), device="cpu")
        weight.n, weight.k = group.weight["n"], group.weight["k"]
        for direction in group.directions:
            reduction = weight.n if direction else weight.k
            for arm in group.arms:
                x = torch.empty(min(arm.tokens or reduction, reduction), reduction, dtype=torch.bfloat16)
                text = kernels.plan(kernels.call(weight, x, x, direction, **arm.options))
                planned += 1
                wrong += [why] if (why := check.plan_is_meant(text, arm)) else []
    assert planned > 1000 and wrong == []
