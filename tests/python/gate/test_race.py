"""The race gate on a tiny model: late copies break the unsafe arm and nothing else, and the threshold is shown."""

import pytest

from nybble.gate.__main__ import main
from nybble.gate.training.needs import missing

if missing() is not None:
    pytest.skip(missing(), allow_module_level=True)

from nybble.gate.race import grid, sizes
from nybble.gate.race.gate import Point, RaceGate
from nybble.gate.runner import Verdict, one_thread, run_gate
from nybble.gate.training.store import Shape

SHAPE = Shape(64, 64, 3, 2, 1, 32)


@pytest.fixture(scope="module")
def gate():
    with one_thread():
        made = RaceGate("cpu", SHAPE, 4, (0.0, 8.0), repeats=1)
        yield made
        made.close()


@pytest.fixture(scope="module")
def report(gate):
    with one_thread():
        return run_gate(gate, algorithms="warn")


def test_late_copies_break_the_unsafe_arm_and_nothing_else(report, gate):
    assert report.verdict == Verdict.OK
    assert [r.arm for r in report.results if r.backward_wrong] == ["repair disabled"]
    assert [claim.text for claim in report.claims if not claim.holds] == []


def test_the_sweep_goes_from_prompt_to_late(report, gate):
    assert [point.visits for point in gate.points] == [0.0, 8.0]
    assert all(gate.points[-1].wrong_layers) and gate.points[-1].delay_us > gate.visit_us
    assert gate.product_differences == [0, 0]


def test_the_grid_measures_every_size_at_every_rate(gate):
    shapes = Shape(64, 64, 3, 2, 1, 32), Shape(128, 128, 3, 2, 1, 32)
    with one_thread():
        points = grid.measured("cpu", shapes, 4, 1)
    assert [p.column for p in points] == [0, 1, 2] * 2
    assert points[0].size.layer_bytes < points[3].size.layer_bytes
    slow = points[3]
    assert slow.visits == pytest.approx(4, rel=0.2) and slow.predicted == "wrong" and slow.seen == "wrong"
    assert set(slow.as_data()) >= {"layer_bytes", "link_gb_s", "copy_visits", "predicted", "seen"}


def points_of(*seen):
    """Three sizes at three rates; a copy of size i at rate j takes 4^(i - j) visits."""
    sizes = [grid.Size(1000 * 4**i, 1.0, 0.0) for i in range(3)]
    words = {"right": (0, 0), "wrong": (1, 1), "mixed": (0, 1)}
    cells = [(size, j) for size in sizes for j in range(3)]
    return [grid.Point(size, j, 4.0**j, words[what]) for (size, j), what in zip(cells, seen, strict=True)]


def test_the_explanation_is_confirmed_only_by_a_threshold_that_moves_both_ways():
    clear = "mixed", "right", "right", "wrong", "mixed", "right", "wrong", "wrong", "mixed"
    assert grid.conclusion(points_of(*clear)) == (
        "confirmed: 6 of 6 points as predicted, 3 too close to call; the threshold size moves with the rate, and the "
        "threshold rate with the size"
    )
    against = (*clear[:1], "wrong", *clear[2:])
    assert grid.conclusion(points_of(*against)).startswith("not confirmed: 5 of 6")
    assert grid.conclusion([p for p in points_of(*clear) if p.seen == "right"]).startswith("not shown")


def test_words_of_the_threshold(gate, monkeypatch):
    def threshold(*counts):
        points = [Point(float(i), 100 * i, wrong) for i, wrong in enumerate(counts)]
        monkeypatch.setattr(gate, "points", points)
        return gate.threshold()

    assert threshold((0, 0), (0, 2), (2, 2)) == "right up to 0 visits, always wrong from 2"
    assert "never right" in threshold((1, 0), (2, 2))
    assert "never always wrong" in threshold((0, 0), (0, 1))


@pytest.mark.parametrize(
    ("sabotage", "code"),
    [("unrepaired-product", 1), ("repaired-controls", 2), ("zero-adapters", 3), ("layers-not-switched", 3)],
)
def test_exit_code_of_every_sabotage(monkeypatch, capsys, sabotage, code):
    monkeypatch.setitem(sizes.SHAPES, ("cpu", False), (SHAPE, 4, (0.0,)))
    assert main(["race", "--device", "cpu", "--sabotage", sabotage]) == code
    assert f"(exit {code}, " in capsys.readouterr().out
