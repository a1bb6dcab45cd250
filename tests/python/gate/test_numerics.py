"""The numerics gate: its measures by hand, its boundaries, its controls one by one, every exit code."""

import dataclasses

import pytest
import torch

from nybble.gate.__main__ import main
from nybble.gate.checks import run_checks
from nybble.gate.dispatch import Plan, both_sides, boundaries, plan_of
from nybble.gate.multiply import random_weight
from nybble.gate.numerics.gate import NumericsGate, Sizes, thinned
from nybble.gate.numerics.kernels import of_path
from nybble.gate.numerics.measures import difference, half_ulp, ordered, relative_error, sum_excess, sums_in_fp32
from nybble.gate.runner import Verdict

SMALL = ["numerics", "--device", "cpu", "--shapes", "65x99", "--largest", "9"]


@pytest.fixture(scope="module")
def report():
    return run_checks(NumericsGate("cpu", Sizes(((64, 128), (33, 65)), (1, 6), largest=9)))


def test_right_product_is_ok_and_every_control_is_red(report):
    assert report.verdict == Verdict.OK
    controls = [r for r in report.results if r.role == "control"]
    assert len({r.arm for r in controls}) == 6 and all(r.must <= r.red for r in controls)


def test_both_directions_and_both_sides_of_the_cpu_boundary_are_there(report):
    cells = {r.cell for r in report.results}
    for direction in ("forward", "grad_input"):
        assert f"64x128 M 1 seed 0 {direction}" in cells
    (low,) = report.findings["boundaries"]["64x128 forward"]
    assert {f"64x128 M {m} seed 0 forward" for m in (low, low + 1)} <= cells


@pytest.mark.parametrize(
    ("sabotage", "code"),
    [("faulty-product", 1), ("dense-path", 1), ("cured-controls", 2), ("nothing-compared", 3)],
)
def test_exit_code_of_every_sabotage(capsys, sabotage, code):
    assert main([*SMALL, "--sabotage", sabotage]) == code
    assert f"(exit {code}, " in capsys.readouterr().out


def test_where_the_plan_dequantises_no_fault_is_put_into_a_fused_multiply():
    gate = NumericsGate("cpu", Sizes(((33, 65),), (2,), largest=2, seeds=2))
    cell = next(cell for cell in gate.cells if cell.m == 2 and cell.seed == 0)
    planned = dataclasses.replace(cell, plan=plan("dequant"))
    arms = {arm.name for arm in gate.arms if gate.runs(arm, planned)}
    assert arms == {"auto", "dequant", "torch on a dense weight", "dequant, flipped nibble"}
    assert all(gate.runs(arm, cell) for arm in gate.arms)
    later = dataclasses.replace(cell, seed=1)
    assert {arm.role for arm in gate.arms if gate.runs(arm, later)} == {"product", "native"}


def test_too_few_rows_for_a_record_are_no_verdict_and_accuse_nobody():
    sizes = Sizes(((33, 65),), (1,), largest=2, rows_wanted=2)
    assert run_checks(NumericsGate("cpu", sizes)).verdict == Verdict.OK
    report = run_checks(NumericsGate("cpu", dataclasses.replace(sizes, rows_wanted=400)))
    assert report.verdict == Verdict.NO_VERDICT
    assert report.faults[0].startswith("2 (shape, M, seed) rows, expected at least 400")


def plan(key):
    return Plan(key, 0, False, 0, False, key)


@pytest.mark.parametrize("edges", [[], [1], [7, 8], [64, 1024, 1025], [1500, 3000]])
def test_every_boundary_is_found_from_the_plan_alone(edges):
    assert boundaries(lambda m: plan(str(sum(m > edge for edge in edges))), 4096) == edges


def test_both_sides_of_boundaries_and_thinning():
    assert both_sides([4, 9], [1, 9, 100], 50) == [1, 4, 5, 9, 10]
    assert thinned(list(range(10)), 3) == [0, 4, 9] and thinned([1, 2], 3) == [1, 2]


def test_the_plan_is_read_from_its_words():
    found = plan_of(random_weight(64, 128, torch.device("cpu"), 0), 3, "grad_input")
    assert (found.path, found.workspace_bytes, found.batch_invariant) == ("cpu", 0, True)


def test_ulp_counts_representable_values():
    values = torch.tensor([-1.0, -0.0, 0.0, 1.0, 1.0078125], dtype=torch.bfloat16)
    steps = ordered(values).tolist()
    assert steps[1] == steps[2] == 0 and steps[4] - steps[3] == 1 and steps[0] == -steps[3]
    found = difference(values, values.flip(0))
    assert found.max_abs == 2.0078125 and found.max_ulp == 2 * steps[3] + 1 and found.equal_share == pytest.approx(0.2)
    same = torch.ones(38187, dtype=torch.bfloat16)
    assert difference(same, same.clone()).equal_share == 1
    with pytest.raises(ValueError, match="not empty"):
        difference(torch.empty(0), torch.empty(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_ulp_bounds_rounding_and_no_more(dtype):
    exact = torch.randn(4096, dtype=torch.float64) * 8
    error = (exact.to(dtype).double() - exact).abs() / half_ulp(exact, dtype)
    assert error.max() <= 1 and error.max() > 0.9


def test_excess_sees_one_wrong_weight_and_forgives_rounding():
    x, w = torch.randn(4, 256, dtype=torch.float64), torch.randn(32, 256, dtype=torch.float64) / 16
    exact = x @ w.t()
    scale = x.norm(dim=1)[:, None] * w.norm(dim=1)
    assert sum_excess(exact.bfloat16(), exact, scale) == 0
    wrong = w.clone()
    wrong[3, 200] += 0.05
    assert sum_excess((x @ wrong.t()).bfloat16(), exact, scale) > 1000
    assert sum_excess(torch.full_like(exact, float("nan")).bfloat16(), exact, scale) == float("inf")
    assert relative_error(torch.full_like(exact, float("nan")), exact) == float("inf")


def test_kernel_names_tell_the_paths_apart():
    name = "void nybble::small_m::(anonymous namespace)::multiply<8, ...>(nybble::small_m::Params)"
    assert of_path(name, "small_m", "forward") and not of_path(name, "hopper", "forward")
    assert of_path("void nybble::row::row_grad<4>(...)", "row", "grad_input")
    assert not of_path("void nybble::row::row_sum(...)", "row", "grad_input")


def test_the_reference_adds_split_sums_in_fp32_and_the_setting_comes_back():
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction
    with sums_in_fp32():
        assert flags.allow_bf16_reduced_precision_reduction is False
        assert flags.allow_fp16_reduced_precision_reduction is False
    assert flags.allow_bf16_reduced_precision_reduction == before


CONTROLS = [arm for arm in NumericsGate("cpu", Sizes(((33, 65),), (2,), largest=2)).arms if arm.role == "control"]


@pytest.mark.parametrize("control", CONTROLS, ids=lambda arm: arm.name)
def test_one_control_that_is_cured_among_those_that_fail_is_vacuous(control):
    gate = NumericsGate("cpu", Sizes(((33, 65),), (2,), largest=2))
    cured = next(arm for arm in gate.arms if arm.name == ("dequant" if control.name.startswith("dequant,") else "auto"))
    gate.arms = [dataclasses.replace(arm, act=cured.act) if arm.name == control.name else arm for arm in gate.arms]
    assert run_checks(gate).verdict == Verdict.CONTROL_DID_NOT_FAIL
