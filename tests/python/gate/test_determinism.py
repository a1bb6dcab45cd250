"""The determinism gate: every exit code, and that a last bit is seen."""

import pytest
import torch

from nybble.gate.__main__ import main
from nybble.gate.checks import run_checks
from nybble.gate.determinism import arms
from nybble.gate.determinism.command import spans
from nybble.gate.determinism.gate import DeterminismGate, Sizes
from nybble.gate.multiply import random_operand, random_weight
from nybble.gate.numerics.measures import relative_error
from nybble.gate.runner import Verdict

SIZES = Sizes(((64, 128),), (1, 5), repeats=3, largest=6, alone=4)


@pytest.fixture(scope="module")
def report():
    return run_checks(DeterminismGate("cpu", SIZES))


def test_right_product_is_ok_and_controls_fail_their_own_check(report):
    assert report.verdict == Verdict.OK
    red = {(r.arm, check) for r in report.results for check in r.red}
    assert ("sums in order of arrival", arms.REPEATS) in red
    assert ("order by number of rows", arms.ALONE) in red and ("order by number of rows", arms.REPEATS) not in red


def test_default_plans_are_shown_at_every_number_of_rows(report):
    rows = report.findings["default_plan_rows_alone"]["64x128 grad_input"]
    assert [row["m"] for row in rows] == [1, 2, 4, 6] and not any(row["differ"] for row in rows)


@pytest.mark.parametrize(
    ("sabotage", "code"),
    [("arrival-order", 1), ("order-by-rows", 1), ("cured-controls", 2), ("nothing-compared", 3)],
)
def test_exit_code_of_every_sabotage(monkeypatch, capsys, sabotage, code):
    from nybble.gate.determinism import command

    monkeypatch.setitem(command.SIZES, ("cpu", False), SIZES)
    assert main(["determinism", "--device", "cpu", "--sabotage", sabotage]) == code
    assert f"(exit {code}, " in capsys.readouterr().out


def test_one_changed_bit_in_one_repeat_is_seen():
    gate = DeterminismGate("cpu", SIZES)
    calls = []

    def once(direction, operand, weight):
        result = arms.by_plan(direction, operand, weight)
        calls.append(result)
        if len(calls) == 3:
            result.view(torch.int16)[0, 0] ^= 1
        return result

    gate.arms[1].act = once
    assert run_checks(gate).verdict == Verdict.PRODUCT_WRONG


def test_controls_are_right_but_for_the_order_of_their_sums():
    weight = random_weight(64, 128, torch.device("cpu"), 0)
    for direction, columns in (("forward", 128), ("grad_input", 64)):
        operand = random_operand(5, columns, torch.device("cpu"), 0)
        expected = arms.by_plan(direction, operand, weight)
        for act in (arms.arrival_order, arms.order_by_rows):
            assert relative_error(act(direction, operand, weight), expected.double()) < 0.01


def test_spans_join_runs_of_a_path():
    rows = [{"m": m, "path": path} for m, path in ((1, "row"), (2, "row"), (64, "small_m"))]
    assert spans(rows) == "1..2 (row), 64 (small_m)"
