import json
import os
import subprocess
import sys

from nybble import bench
from nybble.timing import Problem, Times


def times(us, auto="portable", plan="portable, measured, tune 0", spread=0.01):
    return Times(Problem(256, 128, 5, "forward"), us, dict.fromkeys(us, spread), auto, plan)


ARMS = {"row": 12.0, "portable": 10.0, "dequant": 30.0, "dequantise": 2.0, "dense": 8.0}


def test_only_a_path_that_is_clearly_faster_beats_auto():
    assert not bench.beaten(times(ARMS)), "dense and dequantise are no paths"
    assert bench.beaten(times(ARMS | {"row": 9.0}))
    assert not bench.beaten(times(ARMS | {"row": 9.7}))
    assert not bench.beaten(times(ARMS | {"row": 9.0}, spread=0.2)), "a spread of 20% says nothing about 10%"


def test_the_table_names_what_auto_takes_and_says_unmeasured():
    text = bench.markdown([times(ARMS), times(ARMS | {"row": 5.0}, plan="portable, unmeasured, tune 0")])
    lines = text.splitlines()
    assert "portable us" in lines[0] and "hopper" not in lines[0] and len(lines) == 4
    assert "| portable " in lines[2] and "1.25" in lines[2] and "unmeasured" not in lines[2]
    assert "portable * (unmeasured)" in lines[3]
    verdict = bench._verdict([times(ARMS | {"row": 5.0}, plan="portable, unmeasured")], "A card")
    assert "A card was not measured" in verdict and "nybble tune" in verdict
    assert "fastest path" in bench._verdict([times(ARMS)], "A card")


def test_the_command_measures_the_cpu_and_writes_json(tmp_path):
    out = tmp_path / "bench.json"
    options = ["--device", "cpu", "--shapes", "64x128", "--m", "1,3", "--rounds", "2", "--json", str(out)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "nybble.bench", "linear", *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tune table: none" in done.stdout and done.stdout.count("| 64x128 |") == 4
    rows = json.loads(out.read_text())["rows"]
    assert {(row["m"], row["direction"]) for row in rows} == {(m, d) for m in (1, 3) for d in ("forward", "grad_input")}
    for row in rows:
        assert row["auto"] == "cpu" and set(row["us"]) == {"cpu", "dequant", "dequantise", "dense"}
        assert all(value > 0 for value in row["us"].values())


def test_bad_arguments_are_refused(capsys):
    assert bench.main(["linear", "--device", "cpu", "--shapes", "64"]) == 3
    assert "expected OUTxIN" in capsys.readouterr().err
