"""bench, tune and plan: the command hands over to the Python package."""

import os
import sys

PYTHON = {"NYBBLE_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def test_bench_runs_the_package_with_the_arguments_and_gives_its_exit_code(nybble):
    done = nybble("bench", "linear", "--help", env=PYTHON)
    assert done.returncode == 0 and "--shapes" in done.stdout, done.stderr
    done = nybble("bench", "linear", "--device", "cpu", "--shapes", "nonsense", env=PYTHON)
    assert done.returncode == 3 and "expected OUTxIN" in done.stderr


def test_tune_shows_the_table_that_the_environment_names(nybble, tmp_path):
    table = tmp_path / "table.json"
    table.write_text('{"nybble_tune": 1, "entries": []}')
    done = nybble("tune", "--show", env={**PYTHON, "NYBBLE_TUNE": str(table)})
    assert done.returncode == 0 and "no tune table is active" in done.stdout, done.stderr
    table.write_text("{}")
    done = nybble("tune", "--show", env={**PYTHON, "NYBBLE_TUNE": str(table)})
    assert done.returncode == 3 and str(table) in done.stderr and 'no "nybble_tune"' in done.stderr


def test_plan_runs_the_package_with_the_arguments_and_gives_its_exit_code(nybble, tmp_path):
    done = nybble("plan", "--help", env={**PYTHON, "PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == 0 and "--gpu-memory" in done.stdout, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "torch" in imported and not imported & {"transformers", "peft", "bitsandbytes"}, "help that takes seconds"
    done = nybble("plan", tmp_path, "--gpu-memory", "8GiB", env=PYTHON)
    assert done.returncode == 4 and "has no config.json" in done.stderr, done


def test_an_interpreter_without_the_package_is_named_with_advice(nybble, tmp_path):
    for python, message in (("no-such-python", "no program no-such-python"), ("false", "no package nybble in false")):
        done = nybble("tune", env={"NYBBLE_PYTHON": python})
        assert done.returncode == 7, done
        assert message in done.stderr and "NYBBLE_PYTHON" in done.stderr
