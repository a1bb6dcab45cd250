"""The verdict on a record of the resident step: what makes it a failure, and how ratios get their interval."""

import copy
import pathlib
import sys

import pytest

HARNESS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks" / "harness"
sys.path.insert(0, str(HARNESS))
import h200_resident_step as bench  # noqa: E402
import resident_step_report as report  # noqa: E402


def row_of(ours, theirs, again):
    arm = dict(loss=5.0, gradient_norm=1.0, nonzero=28, adapters_changed=28, allocated_bytes=2e9, reserved_bytes=3e9)
    return dict(
        tokens=512,
        nybble=arm | dict(launches={"hopper": 42}),
        bitsandbytes=arm | dict(launches={}),
        compared=28,
        loss_difference=1e-4,
        gradient_difference=1e-3,
        gradient_noise=1.1e-3,
        run=0,
        losses=[5.0, 4.0],
        **bench.summary({"nybble": ours, "bitsandbytes": theirs, "bitsandbytes again": again}),
    )


def record_of(row):
    run = dict(torch="2", transformers="5", peft="0", bitsandbytes="0", commit="abc", command="", seconds=50.0)
    return dict(device="card", layers=32, rank=16, runs=[run], rows=[row])


NINE, TEN, ELEVEN = [0.90, 0.91, 0.9, 0.9, 0.89], [1.0, 1.01, 1.0, 0.99, 1.0], [1.1, 1.11, 1.1, 1.09, 1.1]


def test_a_faster_step_has_no_faults():
    record = record_of(row_of(NINE, TEN, TEN))
    assert report.faults(record) == []
    assert record["rows"][0]["ratio"] == pytest.approx(0.9, abs=0.005)
    assert record["rows"][0]["control"] == 1.0
    page = report.markdown(record)
    assert "| 512 | 1000.0 | 900.0 | 0.900 |" in page and "Verdict: at no size shown to be slower" in page


def test_an_interval_that_contains_one_is_not_slower():
    noisy = [0.8, 1.3, 0.9, 1.2, 1.1]
    row = row_of(noisy, TEN, TEN)
    assert row["ratio"] > report.SLOWER and row["interval"][0] < 1 < row["interval"][1]
    assert report.faults(record_of(row)) == []
    assert "~" in report.markdown(record_of(row))


FAULTS = [
    (lambda row: row["nybble"].update(launches={}), "launches of nybble"),
    (lambda row: row["bitsandbytes"].update(launches={"hopper": 1}), "launches of nybble"),
    (lambda row: row.update(loss_difference=float("nan")), "losses differ"),
    (lambda row: row.update(gradient_difference=2e-3), "gradients differ"),
    (lambda row: row.pop("gradient_noise"), "no size has the third summation order"),
    (lambda row: row["nybble"].update(gradient_norm=0.0), "gradients are not zero"),
    (lambda row: row["nybble"].update(nonzero=14), "14 of 28 gradients"),
    (lambda row: row["bitsandbytes"].update(adapters_changed=0), "0 of 28 adapters changed"),
    (lambda row: row.update(compared=0), "no gradient was compared"),
    (lambda row: row.update(losses=[4.0, 5.0]), "the loss did not fall"),
]


@pytest.mark.parametrize(("spoil", "words"), FAULTS)
def test_each_fault_is_found(spoil, words):
    row = copy.deepcopy(row_of(NINE, TEN, TEN))
    spoil(row)
    assert any(words in fault for fault in report.faults(record_of(row)))


def test_slower_and_empty_records_fail():
    (fault,) = report.faults(record_of(row_of(ELEVEN, TEN, TEN)))
    assert fault.startswith("512 tokens: slower, ratio 1.100")
    assert report.faults(record_of(row_of(NINE, TEN, TEN)) | dict(rows=[])) == ["no size was measured"]
