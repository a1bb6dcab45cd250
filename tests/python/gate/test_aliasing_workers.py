"""The aliasing gate's cells shared out to processes: none lost, none twice, and no verdict when a process dies."""

import argparse
import os
from concurrent.futures.process import BrokenProcessPool

import pytest

from nybble.gate.__main__ import main
from nybble.gate.aliasing import command, workers
from nybble.gate.aliasing.cells import all_cells
from nybble.gate.runner import Claim, Expectation, Report, Result, Verdict

CELLS = all_cells((2, 3))


def result(cell, arm="nybble"):
    return Result(arm, "product", cell, 1, [0.0], [0.0], 1, 1, None, False, Expectation(), None)


def report(names, claims=()):
    return Report("aliasing", "?", [result(n) for n in names], {}, claims=list(claims), findings={"layer_mib": {}})


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_every_cell_is_in_one_share(count):
    parts = workers.shares(CELLS, count)
    assert sorted(name for part in parts for name in part) == sorted(cell.name for cell in CELLS)
    assert len(parts) == min(count, len(CELLS)) and max(map(len, parts)) - min(map(len, parts)) <= 1


def test_shares_become_one_report_in_the_order_of_the_cells():
    parts = workers.shares(CELLS, 4)
    claim = Claim("a claim", False, "no")
    whole = workers.merged([report(part, [claim] if i == 2 else []) for i, part in enumerate(parts)], CELLS)
    assert [r.cell for r in whole.results] == [cell.name for cell in CELLS]
    assert whole.claims == [claim] and whole.verdict == Verdict.PRODUCT_WRONG


def test_a_fault_of_any_share_is_a_fault_of_all():
    reports = [report([CELLS[0].name]), report([CELLS[1].name])]
    reports[1].faults.append("not repeatable")
    assert workers.merged(reports, CELLS).verdict == Verdict.NO_VERDICT


def from_a_process(options, names, claims):
    return report(names, [Claim("of the first share", True, "yes")] if claims else [])


def test_processes_make_one_report():
    whole = workers.run_shared(from_a_process, argparse.Namespace(), CELLS[:5], 2)
    assert [r.cell for r in whole.results] == [cell.name for cell in CELLS[:5]]
    assert len(whole.claims) == 1 and whole.seconds > 0


def die(options, names, claims):
    os._exit(9)


def test_a_process_that_dies_ends_the_gate():
    with pytest.raises(BrokenProcessPool):
        workers.run_shared(die, argparse.Namespace(), CELLS[:1], 1)


def test_what_ends_the_gate_is_no_verdict(monkeypatch, capsys):
    monkeypatch.setattr(command, "run_shared", lambda *arguments: 1 / 0)
    assert (
        main(["aliasing", "--device", "cpu", "--slots", "2", "--layers", "4", "--cells", "linear", "--workers", "2"])
        == 3
    )
    assert "the gate itself failed" in capsys.readouterr().err


@pytest.mark.parametrize(("device", "full", "most"), [("cpu", True, 1), ("cuda", False, 1), ("cuda", True, 8)])
def test_only_records_on_a_gpu_take_several_processes(device, full, most):
    assert 1 <= workers.default_count(device, full) <= most
