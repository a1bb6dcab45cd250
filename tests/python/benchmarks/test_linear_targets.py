"""The verdict on a record of the GPU multiply: what counts as missed, and what the tables say."""

import copy
import json
import pathlib
import subprocess
import sys

import pytest

HARNESS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks" / "harness"
sys.path.insert(0, str(HARNESS))
import linear_targets as targets  # noqa: E402


def record_at(ratio):
    """A complete record with every ratio to dense a little below, at `ratio` times, its must."""
    rows = []
    for m, n, k, direction in targets.cells():
        dense = ratio * (targets.must_of(n, k, m) or 2.0)
        row = dict(n=n, k=k, m=m, direction=direction, path="hopper", auto=True, ratio_dense=dense, ratio_bnb=0.9)
        rows.append(
            row | dict(spread=0.02, bnb_spread=0.03, error=2e-3, fused_us=10 * dense, dense_us=10.0, bnb_us=11.0)
        )
    return dict(device="card", torch="2", bitsandbytes="0", protocol="", seconds=1.0, rows=rows)


def spoil(record, change, m=512, n=14336, k=4096, direction="forward"):
    spoilt = copy.deepcopy(record)
    for row in spoilt["rows"]:
        if (row["m"], row["n"], row["k"], row["direction"]) == (m, n, k, direction):
            row.update(change)
    return spoilt


def test_a_record_within_all_musts_misses_none():
    assert targets.misses(record_at(0.999)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(ratio_dense=1.16), "1.160 of dense, must 1.15"),
        (dict(ratio_dense=float("nan")), "nan of dense"),
        (dict(ratio_bnb=1.05), "1.050 of bitsandbytes"),
        (dict(error=0.5), "result differs from dense"),
        (dict(invariant_error=float("nan")), "batch-invariant result differs from dense"),
        (dict(auto=False), "not measured"),
    ],
)
def test_one_spoilt_row_is_one_miss(change, words):
    missed = targets.misses(spoil(record_at(0.999), change))
    assert len(missed) == 1 and words in missed[0] and "14336x4096 M512 forward" in missed[0]


@pytest.mark.parametrize("change", [dict(ratio_bnb=None, bnb_spread=None), dict(ratio_bnb=1.02)])
def test_no_bitsandbytes_or_a_tie_within_the_spread_is_no_miss(change):
    assert targets.misses(spoil(record_at(0.999), change)) == []


@pytest.mark.parametrize(
    ("change", "missed"), [(dict(ratio_dense=9.0), 0), (dict(auto=False), 0), (dict(ratio_bnb=1.05), 1)]
)
def test_tokens_between_the_targets_need_only_keep_up_with_bitsandbytes(change, missed):
    assert len(targets.misses(spoil(record_at(0.999), change, m=160))) == missed


@pytest.mark.parametrize(
    ("shape", "m", "must"),
    [
        ((14336, 4096), 16, 0.80),
        ((28672, 8192), 128, 1.15),
        ((28672, 8192), 160, None),
        ((4096, 4096), 256, 1.40),
        ((1024, 4096), 1024, None),
        ((1024, 4096), 2048, 1.07),
    ],
)
def test_musts_follow_shape_and_tokens(shape, m, must):
    assert targets.must_of(*shape, m) == must


def test_geometric_mean_leaves_out_what_is_only_reported():
    record = record_at(1.0)
    means = targets.geometric_means(spoil(record, dict(ratio_dense=100.0), m=64, n=1024))
    assert means == targets.geometric_means(record)
    assert means[2048] == pytest.approx((1.05**10 * 1.07**4) ** (1 / 14))


def test_the_table_marks_what_is_missed_and_what_is_not_there():
    record = spoil(record_at(0.999), dict(ratio_dense=1.3))
    record["rows"] = [r for r in record["rows"] if r["m"] != 16384]
    line = next(t for t in targets.markdown(record).splitlines() if t.startswith("| 14336 x 4096 | forward"))
    assert "1.30! h" in line and line.count("!") == 1 and line.endswith("| - |")


@pytest.mark.parametrize(("ratio", "code"), [(0.999, 0), (1.001, 1)])
def test_the_script_exits_with_the_verdict(ratio, code, tmp_path):
    file = tmp_path / "record.json"
    file.write_text(json.dumps(record_at(ratio)))
    command = [sys.executable, str(HARNESS / "h200_linear.py"), "--judge", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == code, result.stdout + result.stderr
    assert "geometric mean by M" in result.stdout


def test_tokens_without_a_must_are_held_against_the_line_between_their_neighbours():
    assert targets.between(14336, 4096, 512) == targets.must_of(14336, 4096, 512)
    assert 0.95 < targets.between(14336, 4096, 96) < targets.between(14336, 4096, 120) < 1.15
    assert targets.between(1024, 4096, 96) is None, "only reported, as its neighbours are"
    row = dict(n=14336, k=4096, m=96, ratio_dense=1.06)
    assert targets.mark(row) == "" and targets.mark(row | dict(ratio_dense=1.07)) == "?"
    assert targets.mark(row | dict(m=64)) == "!" and targets.mark(row | dict(m=128)) == ""


def test_the_cost_of_batch_invariance_is_one_where_the_plan_is_invariant_by_itself():
    record = spoil(record_at(0.999), dict(invariant_us=3.0, fused_us=2.0)) | dict(invariant=True)
    costs = targets.invariance_costs(record)
    assert costs[512].count(1.5) == 1 and max(costs[512]) == 1.5 and set(costs[64]) == {1.0}
    other = spoil(record, dict(path="small_m"))  # with batch_invariant the Hopper path would be taken
    assert len(targets.invariance_costs(other)[512]) == len(costs[512])
    del next(row for row in other["rows"] if "invariant_us" in row)["invariant_us"]
    assert len(targets.invariance_costs(other)[512]) == len(costs[512]) - 1
    lines = targets.markdown(record).splitlines()
    (largest,) = (line for line in lines if line.startswith("| largest |"))
    assert largest.split(" | ")[1 + list(costs).index(512)] == "1.50"
    assert "batch_invariant" not in targets.markdown(record_at(0.999)), "a record that has not measured it"


def test_plans_that_launch_the_same_are_not_timed_twice():
    import h200_linear

    plan = "hopper variant 1, grid 132, split 1, group 1, workspace 0 bytes, batch invariant, measured, tune 0 (why)"
    assert h200_linear.same_work(plan, plan.replace("measured", "unmeasured").replace("why", "whole tiles"))
    assert not h200_linear.same_work(plan, plan.replace("variant 1", "variant 4"))
    assert not h200_linear.same_work(plan, plan.replace("hopper", "small_m"))


def test_a_path_that_auto_should_have_taken_is_named():
    record = record_at(0.999) | dict(paths={"portable": 2048})
    auto = next(row for row in record["rows"] if row["m"] == 64)
    for share in (2, 0.9):
        record["rows"].append(auto | dict(path="portable", auto=False, fused_us=share * auto["fused_us"]))
    page = targets.markdown(record)
    assert "| portable | 1.34 (0.90) |" in page
    assert f"Below 0.97 of `auto`: {targets.where(auto)} portable 0.90." in page
    assert targets.misses(record) == []
    record["rows"][-1]["error"] = 0.5
    assert "portable): result differs" in targets.misses(record)[0]


def test_the_weight_that_stays_in_l2_has_a_table():
    record = record_at(0.999)
    for row in record["rows"]:
        if (row["n"], row["k"]) == (4096, 4096):
            row.update(warm_fused_us=12.0, warm_dense_us=10.0)
    lines = targets.markdown(record).splitlines()
    assert sum(line.startswith(("| forward | 1.20", "| grad_x | 1.20")) for line in lines) == 2
    assert "stays in L2" not in targets.markdown(record_at(0.999))


def test_a_record_of_plain_scales_and_fewer_tokens_has_files_of_its_own_and_misses_only_what_it_names():
    tokens = [64, 512]
    record = record_at(0.999) | dict(scales="plain", tokens=tokens)
    record["rows"] = [row for row in record["rows"] if row["m"] in tokens]
    assert targets.misses(record) == []
    text = targets.markdown(record)
    assert "plain NF4" in text and "h200-linear-plain.svg" in text and "M 64 | M 512 |" in text and "M 128" not in text
    record["rows"] = [row for row in record["rows"] if row["m"] == 64]
    assert len(targets.misses(record)) == len(targets.cells([512]))
