"""The aliasing gate itself: its arms in small cells, every exit code through the command, the reads on purpose."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nybble
from nybble.gate.__main__ import main
from nybble.gate.aliasing import cells, reads
from nybble.gate.aliasing.cells import Mode, Ring, Stack
from nybble.gate.aliasing.gate import AliasingGate, default_arms, run_on_one_thread
from nybble.gate.aliasing.layers import Base
from nybble.gate.aliasing.ring import SlotRing
from nybble.gate.aliasing.stacks import Sizes
from nybble.gate.runner import Verdict

ROOT = Path(__file__).parents[3]
SMALL = ["--device", "cpu", "--slots", "2", "--layers", "4", "--tokens", "4"]


@pytest.fixture
def linear_only(monkeypatch):
    """The gate with its first group of cells: the verdicts need no more."""
    monkeypatch.setattr(cells, "GROUPS", cells.GROUPS[:1])


@pytest.fixture(scope="module")
def report():
    """Every arm with 4 layers, in every cell with 2 slots and in the linear ones with 3."""
    gate = AliasingGate(slots=(2, 3), sizes=Sizes(layers=4, tokens=4))
    gate.cells = [cell for cell in gate.cells if cell.slots == 2 or not cell.is_llama]
    return run_on_one_thread(gate)


def test_every_cell_is_as_predicted(report):
    assert [(r.arm, r.cell) for r in report.results if not r.as_expected or r.faults] == []
    assert report.faults == []


@pytest.mark.skipif(not torch.cuda.is_available() or nybble.build_info()["cuda"] is None, reason="no GPU")
def test_every_cell_is_as_predicted_on_the_gpu():
    gate = AliasingGate(device="cuda", slots=(2, 3), sizes=Sizes(layers=5))
    report = run_on_one_thread(gate, repeats=2)
    assert report.faults == [] and [claim.text for claim in report.claims if not claim.holds] == []
    assert [(r.arm, r.cell, r.raised) for r in report.results if not r.as_expected or r.faults] == []
    assert report.verdict == Verdict.OK


def test_forward_is_right_in_every_arm_and_cell_that_ran_to_its_end(report):
    ended = [r for r in report.results if r.raised is None]
    assert len(ended) > 80 and not any(r.forward_wrong for r in ended)
    assert all(r.forward_compared == 4 and r.backward_compared > 4 for r in ended)


def test_nybble_and_bf16_are_exact_in_every_cell(report):
    safe = [r for r in report.results if r.arm in ("nybble", "bf16")]
    assert len(safe) == 2 * 3 * (2 * 2 + 3)
    assert not any(r.backward_wrong or r.raised for r in safe)


def test_unsafe_arms_are_wrong_unchecked_and_raise_checked(report):
    found = {(r.arm, r.cell): r for r in report.results}
    wrong = [(arm, cell) for arm, cell in found if "on ctx" in arm and found[arm, cell].backward_wrong]
    assert len(wrong) == 18
    for arm, cell in wrong:
        checked = found[arm.replace(" on ctx", ", checked"), cell]
        assert checked.stale and "expected, slot holds" in checked.raised


def test_bitsandbytes_is_wrong_where_the_weight_is_on_ctx(report):
    pytest.importorskip("bitsandbytes")
    by_arm = {
        arm: {r.cell: r.backward_wrong for r in report.results if r.arm == arm}
        for arm in ("bitsandbytes", "weight on ctx")
    }
    assert by_arm["bitsandbytes"] == by_arm["weight on ctx"]


def test_a_copy_cures_an_unsafe_op_only_of_what_it_keeps_and_when_it_keeps_it(report):
    wrong = {(r.arm, r.cell): r.backward_wrong for r in report.results}
    broken = [cell for arm, cell in wrong if arm == "weight on ctx" and wrong[arm, cell]]
    late = [cell for cell in broken if cell.startswith("llama")]
    assert len(broken) >= 8 and len(late) == 2
    for cell in broken:
        assert not wrong["copy in forward", cell]
        assert wrong["copy in recompute", cell] == wrong["weight on ctx", cell]
    for cell in late:
        assert not wrong["copy, quantised", cell]
        assert wrong["copy, the rest", cell] == wrong["weight on ctx", cell]
    assert not any(arm in ("copy, quantised", "copy, the rest") and cell.startswith("linear") for arm, cell in wrong)


def test_every_backward_of_a_run_on_one_ring_shows_the_same_pattern():
    gate = AliasingGate(slots=(2, 3), sizes=Sizes(layers=4, tokens=4), backwards=3)
    gate.cells = [cell for cell in gate.cells if cell.mode is not Mode.REENTRANT and cell.slots == 3]
    report = run_on_one_thread(gate, repeats=2)
    assert report.verdict == Verdict.OK
    assert {len(set(r.measured)) for r in report.results} == {1}
    assert {len(r.measured) for r in report.results if r.raised is None} == {6}


def test_reads_on_purpose_raise_and_legal_reads_do_not():
    claims = reads.claims(torch.device("cpu"))
    assert len(claims) == 10
    assert [claim.text for claim in claims if not claim.holds] == []


def test_reads_on_purpose_notice_a_pool_without_owner_check(monkeypatch):
    monkeypatch.setattr(reads.Scene, "multiply", lambda self, x: _unguarded(x, self.ring.acquire(0)["weight"]))
    broken = [claim.text for claim in reads.claims(torch.device("cpu")) if not claim.holds]
    assert broken == [f"backward of a slot that is {state}, checkpoint, raises" for state in ("stale", "in flight")]


def _unguarded(x, weight):
    from nybble.gate.aliasing.arms import product

    return product(x, dataclasses.replace(weight, uid=None))


@pytest.mark.parametrize(
    ("sabotage", "code"),
    [
        (None, Verdict.OK),
        ("unsafe-product", Verdict.PRODUCT_WRONG),
        ("safe-control", Verdict.CONTROL_DID_NOT_FAIL),
        ("nothing-compared", Verdict.NO_VERDICT),
        ("zero-adapters", Verdict.NO_VERDICT),
        ("unrepeatable", Verdict.NO_VERDICT),
        ("other-path", Verdict.NO_VERDICT),
    ],
)
def test_exit_code_of_every_sabotage(linear_only, capsys, sabotage, code):
    if sabotage == "other-path":
        pytest.importorskip("bitsandbytes")
    assert main(["aliasing", *SMALL, *(["--sabotage", sabotage] if sabotage else [])]) == code
    assert f"(exit {int(code)}, " in capsys.readouterr().out


def test_bypassed_pool_is_exact_in_every_arm_and_json_says_so(linear_only, capsys):
    assert main(["aliasing", *SMALL, "--bypass-pool", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {r["arm"] for r in report["results"]} >= {"nybble", "bf16", "weight on ctx", "scales, checked"}
    assert {r["shown"] for r in report["results"]} == {"...."}
    assert all(r["backward"]["compared"] > 0 for r in report["results"])


def test_arm_that_differs_with_nothing_recycled_means_an_unsound_harness(linear_only):
    gate = AliasingGate(slots=(2,), sizes=Sizes(layers=4, tokens=4), bypass=True, arms=default_arms()[:2])
    plain = gate.measure

    def measure(arm, cell):
        (outcome,) = plain(arm, cell)
        outcome.backward[2]["scale"] = outcome.backward[2]["scale"] + 1
        return outcome

    gate.measure = measure
    assert run_on_one_thread(gate).verdict == Verdict.NO_VERDICT


def test_missing_bitsandbytes_is_listed_as_not_run(linear_only, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert main(["aliasing", *SMALL]) == 0
    assert "not run: bitsandbytes (ModuleNotFoundError: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["aliasing", "--slots", "1"],
        ["aliasing", "--slots", "x"],
        ["aliasing", "--slots", "8", "--layers", "8"],
        ["aliasing", "--cells", "no such cell"],
        ["none"],
    ],
)
def test_bad_command_line_is_64_and_no_verdict(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 64
    assert "expected" in capsys.readouterr().err or arguments == ["none"]


def test_crash_of_the_gate_is_3_and_not_an_accusation(monkeypatch, capsys):
    monkeypatch.setattr(Base, "__init__", lambda *args, **kwargs: 1 / 0)
    assert main(["aliasing", *SMALL]) == Verdict.NO_VERDICT
    assert "the gate itself failed" in capsys.readouterr().err


def test_a_ring_keeps_a_late_copy_back_until_acquire_and_counts_loads():
    base = Base({"weight": (64, 64)}, 3, dense=True, device=torch.device("cpu"), dtype=torch.bfloat16, seed=0)
    cell = cells.Cell(Stack.LLAMA_QV, Ring.FIXED_HELD, Mode.EARLY_STOP, 2)
    ring = SlotRing(base, cell, checks=False)
    first = ring.acquire(0)["weight"].clone()
    assert not ring.views[1]["weight"].any()  # layer 1 was issued and has not landed
    second = ring.acquire(1)["weight"].clone()
    assert second.any() and not torch.equal(first, second)
    assert torch.equal(ring.views[0]["weight"], first)  # layer 2 was issued and has not landed
    assert ring.loads == 3
    prompt = SlotRing(base, dataclasses.replace(cell, ring=Ring.FIXED_PROMPT), checks=False)
    prompt.acquire(0)
    assert torch.equal(prompt.views[1]["weight"], second)


def test_script_is_the_same_command():
    command = [sys.executable, str(ROOT / "benchmarks/harness/aliasing.py"), "--help"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout
    assert "python -m nybble.gate aliasing" in printed and "--bypass-pool" in printed
