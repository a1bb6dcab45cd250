"""The verdict on a record of the portable path: what counts as missed, without a GPU."""

import copy
import json
import pathlib
import sys

import pytest

HARNESS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks" / "harness"
sys.path.insert(0, str(HARNESS))
import portable_model as model  # noqa: E402
import portable_targets as targets  # noqa: E402

SKELETON, SLOW = targets.MEANS


def record_at(skeleton=1.19, slow=1.04, bnb=0.9, off=0.0):
    """A complete record with the same ratios in every cell; the slower skeleton and the portable tiles say nothing.
    off: how far what the model predicts is from what was measured.
    """
    cells = []
    for n, k, m, direction in targets.wanted():
        path = "row" if m <= targets.ROW_TOKENS else "portable"
        us = dict(auto=100.0 * skeleton, d256=100.0, d256c=110.0, p256=50.0, cublas=60.0, bnb=100.0 * skeleton / bnb)
        if m in targets.LARGE_TOKENS:
            us |= dict(autox5=500.0 * slow, d256x5=520.0, d256cx5=500.0, p256x5=450.0, dq=20.0)
            separate = us["autox5"] / model.SLOW_H200.ratio(m) / (1 + off)
            us |= dict(s256x5=separate, s256cx5=separate * 1.1)
        cells.append(dict(n=n, k=k, m=m, direction=direction, us=us, plans=dict(auto=f"{path} variant 0"), error=2e-3))
    return dict(device="NVIDIA H200", torch="2", result=dict(cells=cells))


def missed(record):
    return targets.misses(record["result"]["cells"])


def spoil(record, change, m=512, n=14336, k=4096, direction=0):
    spoilt = copy.deepcopy(record)
    for cell in spoilt["result"]["cells"]:
        if (cell["m"], cell["n"], cell["k"], cell["direction"]) == (m, n, k, direction):
            change(cell)
    return spoilt


def test_a_record_within_all_targets_misses_none():
    assert missed(record_at()) == []


def test_a_mean_at_its_limit_is_within():
    assert missed(record_at(skeleton=1.20, slow=1.05)) == []


@pytest.mark.parametrize(
    ("ratios", "name", "text"),
    [
        (dict(skeleton=1.2001), SKELETON, "1.2001, at most 1.20"),
        (dict(slow=1.0503), SLOW, "1.0503, at most 1.05"),
        (dict(slow=1.0501), SLOW, "1.0501, at most 1.05"),
    ],
)
def test_a_mean_above_its_limit_is_one_miss_and_shows_four_digits(ratios, name, text):
    record = record_at(**ratios)
    assert missed(record) == [f"{name}: {text}"]
    shown = "\n".join(targets.lines(targets.verdict(record)))
    assert f"{name}, M >= 512: {text[:6]}" in shown and "1 targets missed" in shown


def test_the_mean_is_of_what_the_plan_takes_over_the_faster_skeleton_and_shown_by_direction():
    record = record_at(skeleton=1.0)
    for cell in record["result"]["cells"]:
        if cell["m"] in targets.LARGE_TOKENS:
            cell["us"]["auto"] = 121.0 if cell["direction"] == 0 else 100.0  # p256, 50, is not what runs
    values = targets.means(record["result"]["cells"])[SKELETON]
    assert (values["forward"], values["grad_x"], values["both"]) == pytest.approx((1.21, 1.0, 1.1))
    assert values["cells"] == len(targets.SHAPES) * len(targets.LARGE_TOKENS) * 2


@pytest.mark.parametrize(
    ("m", "bnb", "words"),
    [
        (256, 1.0, "must be faster"),
        (16, 1.01, "must be faster"),
        (8, 1.01, "must not be slower"),
        (1, 1.0, None),
        (16, 0.999, None),
        (512, 2.0, None),
    ],
)
def test_against_bitsandbytes_every_cell_counts(m, bnb, words):
    texts = missed(spoil(record_at(), lambda cell: cell["us"].update(bnb=cell["us"]["auto"] / bnb), m=m))
    assert len(texts) == (words is not None) and all(words in text and f" M{m} forward" in text for text in texts)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda cell: cell.update(error=float("nan")), "differs from dense"),
        (lambda cell: cell.update(error=0.5), "differs from dense"),
        (lambda cell: cell.update(m=3), "M512 forward: not measured"),
        (lambda cell: cell["us"].pop("d256x5"), f"{SLOW} not measured"),
        (lambda cell: cell["us"].pop("s256x5"), "(dequantise + dense), every mma issued five times not measured"),
        (lambda cell: cell["us"].update(s256cx5=0.8 * cell["us"]["autox5"]), "the model predicts 0.9468"),
        (lambda cell: cell["us"].pop("d256c"), f"{SKELETON} not measured"),
        (lambda cell: cell["plans"].update(auto="row variant 8"), "the plan took row"),
    ],
)
def test_one_spoilt_cell_is_one_miss(change, words):
    texts = missed(spoil(record_at(), change))
    assert len(texts) == 1 and words in texts[0]


@pytest.mark.parametrize(("off", "count"), [(0.15 - 1e-6, 0), (0.1501, 24), (-0.1499, 0), (-0.1501, 24)])
def test_the_model_may_be_off_by_15_percent_either_way(off, count):
    texts = missed(record_at(off=off))
    assert len(texts) == count and all("at most 15% off" in text for text in texts)
    verdict = targets.verdict(record_at(off=off))
    assert [row["within"] for row in verdict["model"]] == [count == 0] * 24
    assert f"{24 - count} of 24 cells within 15%" in "\n".join(targets.lines(verdict))


def test_no_bitsandbytes_is_not_measured():
    texts = missed(spoil(record_at(), lambda cell: cell["us"].pop("bnb"), m=64))
    assert texts == ["14336x4096 M64 forward: bitsandbytes not measured"]


@pytest.mark.parametrize(
    ("ratios", "device", "code"),
    [({}, "NVIDIA H200", 0), (dict(slow=1.0503), "NVIDIA H200", 1), ({}, "NVIDIA A100", 3)],
)
def test_judging_a_record_needs_no_gpu(tmp_path, monkeypatch, capsys, ratios, device, code):
    import portable_time

    path = tmp_path / "record.json"
    path.write_text(json.dumps(record_at(**ratios) | dict(device=device)))
    monkeypatch.setattr(sys, "argv", ["portable_time.py", "--judge", str(path)])
    assert portable_time.main() == code
    assert "fused / own dense skeleton, M >= 512: 1.1900 (at most 1.20" in capsys.readouterr().out
