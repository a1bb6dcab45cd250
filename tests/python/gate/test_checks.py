"""The runner of checks on a toy gate, and what reports and records say of it."""

import dataclasses
import json

import pytest
import torch

from nybble.gate import record
from nybble.gate.checks import Check, CheckArm, CheckGate, Judged, run_checks
from nybble.gate.report import as_json, verdict_lines
from nybble.gate.runner import Verdict
from nybble.gate.sabotage import cured_controls, faulty_product, nothing_compared


@dataclasses.dataclass(frozen=True)
class Cell:
    name: str = "only"


class ToyGate(CheckGate):
    """An arm gives a number; it must be small and even."""

    name = "toy"
    question = "does the runner see it?"
    device = torch.device("cpu")

    def __init__(self):
        self.cells = [Cell(), Cell("second")]
        self.left_out = {}
        self.arms = [
            CheckArm("op", "product", lambda: 2),
            CheckArm("torch", "native", lambda: 4),
            CheckArm("large", "control", lambda: 100, must=frozenset({"small"})),
            CheckArm("odd", "control", lambda: 101, must=frozenset({"even"}), may=frozenset({"small"})),
        ]

    def judge(self, arm, cell, shared):
        found = arm.act()
        return Judged([Check("small", found < 9, str(found)), Check("even", found % 2 == 0, str(found))], 1)


def verdict_after(plant):
    gate = ToyGate()
    plant(gate)
    return run_checks(gate).verdict


def replace_act(index, act):
    def plant(gate):
        gate.arms[index] = dataclasses.replace(gate.arms[index], act=act)

    return plant


def test_right_product_and_controls_that_fail_are_ok():
    assert verdict_after(lambda gate: None) == Verdict.OK


@pytest.mark.parametrize(
    ("plant", "code"),
    [
        (faulty_product("large"), Verdict.PRODUCT_WRONG),
        (replace_act(0, lambda: 1 / 0), Verdict.PRODUCT_WRONG),
        (replace_act(1, lambda: 5), Verdict.CONTROL_DID_NOT_FAIL),
        (replace_act(2, lambda: 101), Verdict.CONTROL_DID_NOT_FAIL),
        (replace_act(2, lambda: 1 / 0), Verdict.CONTROL_DID_NOT_FAIL),
        (replace_act(3, lambda: 100), Verdict.CONTROL_DID_NOT_FAIL),
        (cured_controls, Verdict.CONTROL_DID_NOT_FAIL),
        (nothing_compared, Verdict.NO_VERDICT),
        (lambda gate: gate.cells.clear(), Verdict.NO_VERDICT),
        (lambda gate: gate.arms.pop(0), Verdict.NO_VERDICT),
        (lambda gate: gate.arms.__delitem__(slice(2, 4)), Verdict.CONTROL_DID_NOT_FAIL),
    ],
    ids=[
        "product fails",
        "product raises",
        "native fails",
        "control fails another check too",
        "control raises",
        "control fails the wrong check",
        "controls cured",
        "nothing compared",
        "no cells",
        "no product",
        "no control",
    ],
)
def test_every_way_of_being_wrong_or_vacuous(plant, code):
    assert verdict_after(plant) == code


def test_report_says_why():
    gate = ToyGate()
    faulty_product("odd")(gate)
    report = run_checks(gate)
    text = "\n".join(verdict_lines(report))
    assert "op | only: small: 101; even: 101; expected every check to hold" in text
    assert "control  large" in text and "must: small" in text
    assert as_json(report)["results"][0]["checks"]["small"] == {"holds": False, "found": "101"}


def test_a_record_has_what_is_needed_to_run_it_again(tmp_path, monkeypatch):
    monkeypatch.setenv("NYBBLE_COMMIT", "0123abc")
    report = run_checks(ToyGate())
    report.not_run["race"] = "no GPU"
    record.write(
        tmp_path / "cpu-gate-toy.json", as_json(report), text=["a table"], notes=["a surprise"], arguments=["toy"]
    )
    data = json.loads((tmp_path / "cpu-gate-toy.json").read_text())
    assert data["commit"] == "0123abc" and data["verdict"] == 0 and len(data["results"]) == 8
    page = (tmp_path / "cpu-gate-toy.md").read_text()
    for part in ("does the runner see it?", "0123abc", "a table", "- a surprise", "Not measured: race (no GPU)"):
        assert part in page


def test_a_record_of_few_rows_keeps_the_words_of_checks_that_hold(tmp_path, monkeypatch):
    for few, words in ((20, True), (7, False)):
        monkeypatch.setattr(record, "FEW", few)
        record.write(tmp_path / "few.json", as_json(run_checks(ToyGate())), text=[], notes=[], arguments=["toy"])
        results = json.loads((tmp_path / "few.json").read_text())["results"]
        assert any(c["found"] for r in results for c in r["checks"].values() if c["holds"]) == words
