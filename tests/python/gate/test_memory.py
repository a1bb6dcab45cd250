"""The memory gate: every exit code, and what its measures see."""

import mmap

import pytest
import torch

from nybble.gate.__main__ import main
from nybble.gate.checks import run_checks
from nybble.gate.memory import command
from nybble.gate.memory.gate import MIB, MemoryGate, ModelCell, Sizes
from nybble.gate.memory.peaks import ResidentPeak, StorageLedger, bytes_of
from nybble.gate.runner import Verdict
from nybble.gate.training.needs import missing
from nybble.gate.training.store import Shape

STEPS = Sizes((), (3, 5), dim=64, tokens=4)
MODEL = Sizes((), (3, 5), 64, 4, (2,), Shape(128, 128, 3, 4, 2, 32))
MULTIPLY = Sizes(((6144, 8192, 1),), (), dim=64, tokens=4)
needs_resident_peak = pytest.mark.skipif(ResidentPeak().fault() is not None, reason="no resettable high-water mark")


def test_a_streamed_step_holds_a_window_and_private_copies_the_model():
    gate = MemoryGate("cpu", STEPS)
    report = run_checks(gate)
    assert report.verdict == Verdict.OK
    copies = [r.values for r in report.results if r.arm == "private copies"]
    extra = [(v["held_bytes"] - v["reference_bytes"]) / v["layer_bytes"] for v in copies]
    assert extra[0] > 3 and extra[1] - extra[0] == pytest.approx(2, abs=0.5)


@needs_resident_peak
def test_a_multiply_holds_no_dense_weight_and_dequant_does():
    report = run_checks(MemoryGate("cpu", MULTIPLY))
    assert report.verdict == Verdict.OK
    assert all(r.values["held_bytes"] > 40 * MIB for r in report.results if r.arm == "dequant")


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_streamed_model_keeps_to_its_formula_and_private_copies_grow_with_the_model():
    gate = MemoryGate("cpu", MODEL)
    gate.cells = [cell for cell in gate.cells if isinstance(cell, ModelCell)]
    report = run_checks(gate)
    assert [c.found for r in report.results for c in r.checks if not c.holds and r.role == "product"] == []
    assert report.verdict == Verdict.OK
    over = {"streamed model": [], "model of private copies": []}
    for row in report.results:
        over[row.arm].append((row.values["peak_bytes"] - row.values["formula_bytes"]) / row.values["layer_bytes"])
    assert max(map(abs, over["streamed model"])) < 0.25
    first, second = over["model of private copies"]
    assert first > 1 and second - first == pytest.approx(2, abs=0.5)
    gate.cells = gate.cells[:1]
    command.SABOTAGES["copying-model"](gate)
    assert run_checks(gate).verdict == Verdict.PRODUCT_WRONG


@pytest.mark.parametrize(("sabotage", "code"), [("copying-product", 1), ("cured-controls", 2), ("nothing-compared", 3)])
def test_exit_code_of_every_sabotage(monkeypatch, capsys, sabotage, code):
    monkeypatch.setitem(command.SIZES, ("cpu", False), Sizes((), (2,), dim=64, tokens=4))
    assert main(["memory", "--device", "cpu", "--sabotage", sabotage]) == code
    assert f"(exit {code}, " in capsys.readouterr().out


@needs_resident_peak
def test_a_product_that_dequantises_is_wrong():
    gate = MemoryGate("cpu", MULTIPLY)
    gate.cells = gate.cells[:1]
    command.SABOTAGES["dense-product"](gate)
    assert run_checks(gate).verdict == Verdict.PRODUCT_WRONG


@needs_resident_peak
def test_a_weight_that_the_limit_could_not_show_is_no_verdict():
    gate = MemoryGate("cpu", Sizes(((64, 64, 1),), (), 64, 4))
    assert run_checks(gate).verdict == Verdict.NO_VERDICT


@needs_resident_peak
def test_on_many_cpus_the_mark_lacks_so_much_that_this_weight_is_no_verdict(monkeypatch):
    gate = MemoryGate("cpu", MULTIPLY)
    gate.cells = gate.cells[:1]
    monkeypatch.setattr(ResidentPeak, "unseen", lambda self: 64 * MIB)
    report = run_checks(gate)
    assert report.verdict == Verdict.NO_VERDICT and "would not show" in str(report.faults + report.results)


def test_what_the_mark_may_lack_grows_with_the_square_of_the_cpus(monkeypatch):
    for cpus, pages in ((2, 2 * 32), (32, 32 * 64), (128, 128 * 256)):
        monkeypatch.setattr("os.cpu_count", lambda cpus=cpus: cpus)
        assert ResidentPeak().unseen() == pages * mmap.PAGESIZE


def test_the_ledger_counts_storages_that_live_at_once():
    kept = torch.ones(256)
    with StorageLedger() as ledger:
        for _ in range(3):
            y = kept * 2  # the last one dies when the next is there
        view = y.view(16, 16)
        kept.add_(1)
    assert ledger.peak == 2 * 1024 and view.shape == (16, 16)


@needs_resident_peak
def test_resident_peak_sees_what_a_call_frees_again():
    def call():
        torch.ones(12 * MIB).sum()
        return torch.ones(MIB)

    assert 40 * MIB < ResidentPeak().held(call) < 60 * MIB
    assert bytes_of((torch.ones(3), [torch.ones(2, dtype=torch.int8)])) == 14
