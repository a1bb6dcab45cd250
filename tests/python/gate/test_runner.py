"""The runner on a toy gate: what each way of being vacuous or wrong makes of the verdict."""

from dataclasses import dataclass, field

import pytest
import torch

from nybble.gate.report import as_json, verdict_lines
from nybble.gate.runner import (
    Claim,
    Expectation,
    Outcome,
    Verdict,
    compare,
    differences,
    repeatable_algorithms,
    run_gate,
)

PARTS = 3


@dataclass(frozen=True)
class Arm:
    name: str
    role: str
    wrong: frozenset = frozenset()
    not_run: str | None = None


@dataclass(frozen=True)
class Cell:
    name: str = "only"


PRODUCT, NATIVE, CONTROL = Arm("op", "product"), Arm("torch", "native"), Arm("bad op", "control", frozenset({0}))


@dataclass
class ToyGate:
    """Each part's tensors are ones; a wrong part is twos. `edit` changes an outcome before it is handed over."""

    arms: tuple = (PRODUCT, NATIVE, CONTROL)
    cells: tuple = (Cell(),)
    predicted: dict = field(default_factory=lambda: {"bad op": Expectation(wrong=frozenset({0}))})
    edit: object = None
    edit_reference: object = None
    held: list = field(default_factory=list)
    soundness_only: bool = False
    name: str = "toy"
    question: str = "does the runner see it?"

    def parts_of(self, cell):
        return PARTS

    def runs(self, arm, cell):
        return True

    def reference_key(self, arm, cell):
        return arm.name

    def reference(self, arm, cell):
        outcome = make(frozenset())
        return self.edit_reference(outcome) if self.edit_reference else outcome

    def measure(self, arm, cell):
        outcome = make(arm.wrong)
        return self.edit(arm, outcome) if self.edit else outcome

    def expected(self, arm, cell):
        return self.predicted.get(arm.name, Expectation())

    def claims(self):
        return self.held


def make(wrong):
    backward = [{"g": torch.full((2,), 2.0 if part in wrong else 1.0)} for part in range(PARTS)]
    return Outcome([{"y": torch.ones(2)} for _ in range(PARTS)], backward, nonzero=[torch.ones(1)])


def test_right_product_and_failing_control_are_ok():
    report = run_gate(ToyGate())
    assert report.verdict == Verdict.OK == 0
    assert [r.backward_compared for r in report.results] == [PARTS] * 3


def test_wrong_product_is_1():
    assert run_gate(ToyGate(arms=(Arm("op", "product", frozenset({1})), CONTROL))).verdict == Verdict.PRODUCT_WRONG == 1


def test_wrong_forward_of_the_product_is_1():
    def spoil(arm, outcome):
        if arm is PRODUCT:
            outcome.forward[2]["y"] += 1
        return outcome

    report = run_gate(ToyGate(edit=spoil))
    assert report.verdict == Verdict.PRODUCT_WRONG
    assert [sorted(r.forward_wrong) for r in report.results] == [[2], [], []]


def test_product_that_raises_is_1_even_when_it_raises_the_check():
    def die(arm, outcome):
        return Outcome([], [], raised="StaleWeightError: no", stale=True) if arm is PRODUCT else outcome

    assert run_gate(ToyGate(edit=die)).verdict == Verdict.PRODUCT_WRONG


def test_false_claim_about_the_product_is_1():
    assert run_gate(ToyGate(held=[Claim("raises", False, "nothing raised")])).verdict == Verdict.PRODUCT_WRONG


@pytest.mark.parametrize("wrong", [frozenset(), frozenset({0, 1}), frozenset({1})])
def test_control_with_another_pattern_is_2(wrong):
    assert (
        run_gate(ToyGate(arms=(PRODUCT, Arm("bad op", "control", wrong)))).verdict == Verdict.CONTROL_DID_NOT_FAIL == 2
    )


def test_control_that_must_raise_and_does_not_is_2():
    assert run_gate(ToyGate(predicted={"bad op": Expectation(stale=True)})).verdict == Verdict.CONTROL_DID_NOT_FAIL


def test_control_that_raises_something_else_is_2():
    def die(arm, outcome):
        return Outcome([], [], raised="ValueError: shape") if arm is CONTROL else outcome

    assert (
        run_gate(ToyGate(edit=die, predicted={"bad op": Expectation(stale=True)})).verdict
        == Verdict.CONTROL_DID_NOT_FAIL
    )


def test_wrong_native_arm_is_2():
    assert (
        run_gate(ToyGate(arms=(PRODUCT, Arm("torch", "native", frozenset({0})), CONTROL))).verdict
        == Verdict.CONTROL_DID_NOT_FAIL
    )


def test_no_control_that_can_fail_is_2():
    assert run_gate(ToyGate(arms=(PRODUCT, NATIVE))).verdict == Verdict.CONTROL_DID_NOT_FAIL


def test_product_that_is_not_run_is_3():
    gate = ToyGate(arms=(Arm("op", "product", not_run="not built"), CONTROL))
    report = run_gate(gate)
    assert report.verdict == Verdict.NO_VERDICT == 3
    assert report.not_run == {"op": "not built"}


def test_no_cells_is_3():
    assert run_gate(ToyGate(cells=())).verdict == Verdict.NO_VERDICT


def test_names_that_do_not_meet_are_3_or_wrong_but_never_ok():
    def rename(arm, outcome):
        outcome.backward = [{name + "h": value for name, value in part.items()} for part in outcome.backward]
        return outcome

    assert run_gate(ToyGate(edit=rename)).verdict == Verdict.NO_VERDICT


@pytest.mark.parametrize(
    "edit",
    [
        lambda o: Outcome(o.forward, [{}] * PARTS, o.nonzero),
        lambda o: Outcome(o.forward, o.backward[:1], o.nonzero),
        lambda o: Outcome(o.forward, o.backward, [torch.zeros(1)]),
        lambda o: Outcome(o.forward, [{"g": torch.zeros(2)}] * PARTS, o.nonzero),
        lambda o: Outcome(o.forward, [{"g": torch.rand(2)} for _ in range(PARTS)], o.nonzero),
        lambda o: Outcome([], [], raised="RuntimeError: no"),
    ],
    ids=["no gradients", "fewer parts", "zero LoRA B", "zero gradients", "not repeatable", "raised"],
)
def test_reference_that_cannot_serve_is_3(edit):
    assert run_gate(ToyGate(edit_reference=edit)).verdict == Verdict.NO_VERDICT


@pytest.mark.parametrize(
    ("measured", "reference"),
    [
        ({}, {}),
        ({"cpu.forward": 5, "cpu.grad_input": 3}, {"cpu.forward": 6, "cpu.grad_input": 3}),
        ({"cpu.forward": 6, "cpu.grad_input": 3}, {"dequant.forward": 6, "dequant.grad_input": 3}),
    ],
    ids=["path did not run", "too few launches", "reference took another path"],
)
def test_launches_other_than_expected_are_3(measured, reference):
    def count(launches):
        def edit(outcome):
            outcome.launches = launches
            return outcome

        return edit

    expected = {
        "op": Expectation(launches={"forward": 6, "grad_input": 3}),
        "bad op": Expectation(wrong=frozenset({0})),
    }
    gate = ToyGate(predicted=expected, edit_reference=count(reference), edit=lambda arm, o: count(measured)(o))
    assert run_gate(gate).verdict == Verdict.NO_VERDICT
    gate.edit_reference = gate.edit = None
    good = {"cpu.forward": 6, "cpu.grad_input": 3}
    gate.edit_reference, gate.edit = count(good), lambda arm, o: count(good)(o)
    assert run_gate(gate).verdict == Verdict.OK


def test_difference_with_nothing_recycled_is_3_and_not_an_accusation():
    report = run_gate(ToyGate(arms=(Arm("op", "product", frozenset({1})), NATIVE), soundness_only=True))
    assert report.verdict == Verdict.NO_VERDICT
    assert any("harness is unsound" in line for line in verdict_lines(report))
    assert run_gate(ToyGate(arms=(PRODUCT, NATIVE), soundness_only=True)).verdict == Verdict.OK


def test_one_bad_repeat_among_good_ones_counts():
    calls = []

    def third_time(arm, outcome):
        calls.append(arm)
        return make(frozenset({2})) if arm is PRODUCT and calls.count(arm) == 3 else outcome

    assert run_gate(ToyGate(edit=third_time), repeats=2).verdict == Verdict.OK
    calls.clear()
    assert run_gate(ToyGate(edit=third_time), repeats=3).verdict == Verdict.PRODUCT_WRONG


def test_one_bad_backward_among_the_good_ones_of_a_run_counts():
    def several(bad):
        return lambda arm, outcome: [outcome, make(frozenset({2})) if bad and arm is PRODUCT else outcome, outcome]

    report = run_gate(ToyGate(edit=several(False)), repeats=2)
    assert report.verdict == Verdict.OK
    assert as_json(report)["results"][2]["measured"] == {"X..": 6}
    report = run_gate(ToyGate(edit=several(True)), repeats=2)
    assert report.verdict == Verdict.PRODUCT_WRONG
    assert as_json(report)["results"][0]["measured"] == {"...": 4, "..X": 2}


def test_difference_is_zero_only_for_equal_bits_without_nan():
    one, nan, inf = torch.ones(3), torch.tensor([float("nan")]), float("inf")
    others = [one.clone(), one + 2**-20, one.double(), torch.ones(4), one * 3]
    assert differences([(one, other) for other in others]) == [0.0, 2**-20, inf, inf, 2.0]
    assert differences([(nan, nan), (one[:0], one[:0]), (-0.0 * one, 0.0 * one)]) == [inf, 0.0, 0.0]
    assert differences([]) == []
    assert compare([{"a": one}], [{"a": one}, {"a": one}]) == ([0.0, float("inf")], 1)


def test_report_says_why_and_survives_json():
    report = run_gate(ToyGate(arms=(PRODUCT, Arm("bad op", "control"))))
    text = "\n".join(verdict_lines(report))
    assert "bad op | only: backward ..., expected X.." in text
    data = as_json(report)
    assert data["verdict"] == 2
    assert [r["shown"] for r in data["results"]] == ["...", "..."]


def test_determinism_setting_is_given_back_after_an_error():
    before = torch.are_deterministic_algorithms_enabled()
    with pytest.raises(KeyError), repeatable_algorithms():
        assert torch.are_deterministic_algorithms_enabled()
        raise KeyError
    assert torch.are_deterministic_algorithms_enabled() == before
