"""What profile_linear.py makes of a report of Nsight Compute, without a GPU."""

import os
import pathlib
import select
import sys

import pytest

HARNESS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks" / "harness"
sys.path.insert(0, str(HARNESS))
import profile_linear as profile  # noqa: E402

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
HEADER = ["ID", "Kernel Name", profile.TIME, profile.EXTRA[0], STALL.format("barrier"), STALL.format("wait")]
HEADER += [STALL.format("wait_not_issued"), "launch__grid_size"]
UNITS = ["", "", "nsecond", "%", "", "", "", ""]
ROWS = [
    ["0", "void nybble::hopper::expand_scales(...)", "2,000", "0", "1", "1", "1", "64"],
    ["1", "void nybble::hopper::multiply<...>(...)", "31,500.5", "61.25", "1", "3", "9", "132"],
    ["2", "nvjet_hsh_128x64", "30,000", "80", "2", "0", "9", "128"],
    ["3", "void hopper::multiply_rows<...>(hopper::Params)", "40,000", "50", "1", "1", "9", "132"],
    ["4", "nvjet_hsh_splitK", "9,000", "70", "1", "1", "9", "128"],
    ["5", "void cublasLt::splitKreduce_kernel<...>(...)", "1,000", "0", "1", "1", "9", "32"],
]


def report(rows):
    quoted = [",".join(f'"{value}"' for value in row) for row in [HEADER, UNITS, *rows]]
    return "==PROF== Connected\n==PROF== Disconnected\n" + "\n".join(quoted) + "\n"


def test_kernels_are_told_apart_by_arm_and_cell():
    cells = profile.arms_of(profile.read_report(report(ROWS)))
    assert [[len(cell[arm]) for arm in profile.ARMS] for cell in cells] == [[2, 1], [1, 2]]


def test_times_add_up_and_shares_are_those_of_the_longest_kernel():
    first, second = profile.arms_of(profile.read_report(report(ROWS)))
    ours, dense = profile.summary(first["auto"]), profile.summary(second["cuBLAS"])
    assert ours["us"] == pytest.approx(33.5005) and ours["tensor pipe %"] == 61.25 and ours["CTAs"] == 132
    assert ours["stalls"] == [("wait", 0.75), ("barrier", 0.25)]
    assert dense["us"] == pytest.approx(10.0) and dense["tensor pipe %"] == 70
    assert ours["DRAM %"] is None and "| - |" in profile.line("cell", "auto", ours)


def test_a_report_without_the_first_kernels_of_auto_lacks_that_arm():
    cells = profile.arms_of(profile.read_report(report(ROWS[2:])))
    assert [[len(cell[arm]) for arm in profile.ARMS] for cell in cells] == [[0, 1], [1, 2]]


def test_a_report_without_kernels_has_none():
    assert profile.arms_of(profile.read_report("==ERROR== no metric\n")) == []


def test_a_record_names_its_cells_and_metrics():
    first, second = profile.arms_of(profile.read_report(report(ROWS)))
    rows = [{"cell": "a"} | {arm: profile.summary(cell[arm]) for arm in profile.ARMS} for cell in (first, second)]
    record = dict(rows=rows, device="card", torch="2", commit="c", command="run", seconds=1.0)
    text = profile.markdown(record)
    assert text.count("| a | auto |") == 2 and profile.EXTRA[0] in text
    table = [row for row in text.splitlines() if row.startswith("|")]
    assert len({row.count("|") for row in table}) == 1


def test_cells_are_read_from_text():
    assert profile.cell_of("4096x14336:64:grad_x") == (4096, 14336, 64, "grad_x")
    with pytest.raises(ValueError, match="backward"):
        profile.cell_of("4096x14336:64:backward")


def program(tmp_path, body):
    path = tmp_path / "ncu"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_an_ncu_that_hangs_is_ended_with_what_it_started(tmp_path, capsys):
    """What it started writes into a FIFO that says when its last writer is gone."""
    os.mkfifo(tmp_path / "fifo")
    end = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    ncu = program(tmp_path, f"(echo started; exec sleep 60) > {tmp_path}/fifo &\nwait")
    assert profile.profile(ncu, ["4096x4096:1:forward"], limit=2) is None
    assert "ended after 2 s" in capsys.readouterr().err
    assert os.read(end, 100) == b"started\n"
    gone = select.poll()
    gone.register(end, select.POLLHUP)
    assert gone.poll(20_000) == [(end, select.POLLHUP)]
    os.close(end)


def test_an_ncu_that_fails_is_tried_without_the_extra_metrics_too(tmp_path, capsys):
    assert profile.profile(program(tmp_path, "exit 3"), ["4096x4096:1:forward"]) is None
    assert capsys.readouterr().err.count("ncu exit code 3, 0 of 1 cells") == 2
