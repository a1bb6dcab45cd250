"""What hopper_plans.py and plans_in_step.py make of plans and times, without a GPU."""

import pathlib
import sys

HARNESS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks" / "harness"
sys.path.insert(0, str(HARNESS))
import hopper_plans as plans  # noqa: E402
import plans_in_step as step  # noqa: E402


def test_candidates_are_plans_of_their_own_and_have_names_of_their_own():
    for rows, m in ((4096, 512), (1024, 2048), (14336, 8192)):
        found = plans.candidates(rows, m)
        names = [plans.words(*candidate) for candidate in found]
        assert len(set(names)) == len(set(found)) == len(found) >= 6
    assert plans.words(plans.variant(0, 1, 0), plans.AUTO_GROUP) == "512 stream exp"
    for m, least in ((64, 64), (100, 128), (160, 160), (256, 256)):
        names = [plans.words(*candidate) for candidate in plans.candidates(14336, m)]
        assert len(set(names)) == len(names) and f"rows{least} stream own" in names and "128 whole exp" in names
        assert f"rows{least} whole exp" not in names
    assert plans.words(plans.variant(3, 2, 1), 8) == "rows256 pieces own g8"


def test_ratios_are_those_of_rounds_not_of_medians():
    cell = type(
        "Cell", (), dict(n=1, k=2, m=3, direction="forward", plans={"auto": (None, "plan")}, errors={"auto": 0})
    )
    times = {"dense": [1.0, 2.0, 4.0, 8.0], "auto": [1.1, 2.2, 4.4, 16.0]}  # the card slows down; one outlier
    row = plans.summary(cell, times)
    assert row["ratio"] == {"auto": 1.1} and row["plans"] == {"auto": "plan"} and row["dense_us"] == 3.0


def test_the_other_plan_is_the_best_that_is_not_autos_and_of_the_first_library():
    row = dict(n=4096, k=4096, m=8192, direction="forward")
    row["ratio"] = {"auto": 1.0, "512 whole exp": 1.02, "512 stream own": 1.01, "1:auto": 0.9, "1:512 whole own": 0.8}
    chosen, names = step.others_of(dict(rows=[row, row | dict(m=512)]), 8192)
    assert chosen == {(4096, 4096, 8192, "forward"): (plans.variant(0, 1, 1), plans.AUTO_GROUP)}
    assert names["4096x4096 forward"]["plan"] == "512 stream own"


def test_cells_are_read_from_text():
    assert plans.cells_of(["4096x14336:512,1024", "4096x14336:8"]) == {(4096, 14336): [512, 1024, 8]}
