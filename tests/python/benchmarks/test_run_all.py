import importlib.util
import pathlib
import sys

import pytest

PATH = pathlib.Path(__file__).parents[3] / "benchmarks" / "harness" / "run_all.py"
spec = importlib.util.spec_from_file_location("run_all", PATH)
run_all = importlib.util.module_from_spec(spec)
sys.modules["run_all"] = run_all
spec.loader.exec_module(run_all)


def machine(gpu="", cuda_build=True, build="nowhere", modules=("bitsandbytes",)):
    return run_all.Machine(gpu, cuda_build, pathlib.Path(build), frozenset(modules))


def fits(m):
    return {harness.name for harness in run_all.HARNESSES if not harness.unfit(m)}


def test_without_a_gpu_only_cpu_harnesses_run_and_the_others_say_why():
    assert fits(machine()) == {"cpu-linear", "visit-cost", "linear-bench"}
    assert fits(machine(modules=())) == {"visit-cost", "linear-bench"}
    reasons = {harness.name: harness.unfit(machine()) for harness in run_all.HARNESSES}
    assert reasons["h200-linear"] == "no GPU here"
    assert "built without CUDA" in run_all.needs_gpu(machine("NVIDIA H200", cuda_build=False))


def test_the_targets_of_the_h200_are_not_asked_of_another_card():
    h200, other = machine("NVIDIA H200"), machine("NVIDIA GeForce RTX 3050")
    assert "h200-linear" in fits(h200) and "linear-bench" not in fits(h200)
    assert "h200-linear" not in fits(other) and "linear-bench" in fits(other)
    assert "RTX 3050" in run_all.needs_h200(other)


def test_what_is_not_built_is_named_with_the_command(tmp_path):
    assert "--target portable_bench" in run_all.needs_portable(machine("NVIDIA H200", build=tmp_path))
    (tmp_path / "benchmarks/cuda").mkdir(parents=True)
    (tmp_path / "benchmarks/cuda/libportable_bench.so").touch()
    assert run_all.needs_portable(machine("NVIDIA H200", build=tmp_path)) == ""


def test_everything_that_fits_an_h200_takes_a_few_minutes(tmp_path):
    for name in ("tests/cpp/format/format_cuda_bench", "benchmarks/cuda/libportable_bench.so"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    h200 = machine("NVIDIA H200", build=tmp_path, modules=("bitsandbytes", "transformers", "peft"))
    fitting = [harness for harness in run_all.HARNESSES if not harness.unfit(h200)]
    names = {"visit-cost", "codec", "h200-linear", "portable-time", "resident-step", "cpu-linear"}
    assert {harness.name for harness in fitting} == names
    assert all(0 < harness.expected < harness.seconds for harness in fitting)
    assert sum(harness.expected for harness in fitting) < 400
    latest_start = sum(harness.seconds for harness in fitting[:-1])
    assert latest_start < 900  # the default of --seconds: whatever the others take, the last one starts


def test_a_list_says_what_would_run_and_how_long(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_all, "this_machine", lambda: machine())
    assert run_all.main(["--list", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "would run, about 40 s, at most 90 s" in text and "no GPU here" in text and "about 145 s in all" in text


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([0, 0], 0), ([0, 1], 1), ([3, 1], 1), ([0, 3], 3), ([0, 124], 3), ([0, -11], 1), ([2], 1), ([], 3)],
)
def test_a_missed_must_or_a_crash_outranks_no_verdict(codes, expected):
    assert run_all.exit_code([run_all.Outcome("x", code, 1.0, "") for code in codes]) == expected


def test_a_harness_that_fails_or_does_not_end_is_seen(tmp_path):
    def harness(code, seconds=20):
        return run_all.Harness("probe", seconds, lambda m, out: ["-c", code], lambda m: "")

    outcome = run_all.run(harness("print('measured'); raise SystemExit(1)"), machine(), tmp_path)
    assert (outcome.code, outcome.last, outcome.verdict) == (1, "measured", "FAILED")
    outcome = run_all.run(harness("import time; time.sleep(60)", 1), machine(), tmp_path)
    assert outcome.code == 124 and outcome.verdict == "out of time"
    text = run_all.table([outcome], [("other", "no GPU here")])
    assert "out of time" in text and "not run" in text and "no GPU here" in text


def test_an_unknown_name_is_refused():
    with pytest.raises(SystemExit):
        run_all.main(["--only", "nonsense"])
