"""gpu_stress.py and gpu_sanitize.py with programs that are made up: exit codes, and what their pages say."""

import json
import pathlib
import subprocess
import sys

import pytest

TOOLS = pathlib.Path(__file__).parents[3] / "tools"
# Ends as linear_stress would: right without a fault, by a wrong output with one; `uncaught` names what it misses.
STRESS = """#!{python}
import sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
mark = "{mark}"
fault = given.get("--fault")
if fault is None or (fault, given["--kernels"]) in {uncaught}:
    print("RIGHT: 3 cases")
else:
    print("WRONG after 0.1 s")
    sys.exit(1)
"""


@pytest.fixture
def program(tmp_path):
    def make(name, mark="", uncaught=()):
        path = tmp_path / name
        path.write_text(STRESS.format(python=sys.executable, mark=mark, uncaught=list(uncaught)))
        path.chmod(0o755)
        return path

    return make


def stress(tmp_path, product, faults, *options):
    record = tmp_path / "h200-stress"
    command = [sys.executable, TOOLS / "gpu_stress.py", product, "--faults", faults, "--record", record, *options]
    done = subprocess.run([*map(str, command), "--limit", "0.1"], capture_output=True, text=True)
    assert record.with_suffix(".json").is_file(), done.stdout + done.stderr
    return done, json.loads(record.with_suffix(".json").read_text()), record.with_suffix(".md").read_text()


BLIND = ("no_proxy_fence", "small_m")


def test_a_fault_that_no_run_catches_is_named_with_what_is_known_and_is_no_failure(tmp_path, program):
    faults = program("faults", "nybble_fault_switches_mark", [BLIND])
    done, data, page = stress(tmp_path, program("product"), faults)
    assert done.returncode == 0, done.stdout
    assert len(data["faults"]) == 47 and sum(cell["caught"] is None for cell in data["faults"]) == 1
    assert "46 of 47 cells were caught" in page and "* no_proxy_fence on small_m" in page and "mbarrier" in page
    assert "| `wrong_parity`: a full barrier is awaited with the other parity | wrong output" in page
    assert str(tmp_path) not in page


def test_a_fault_that_should_be_caught_and_is_not_is_a_failure(tmp_path, program):
    faults = program("faults", "nybble_fault_switches_mark", [("wrong_parity", "hopper")])
    done, data, page = stress(tmp_path, program("product"), faults, "--only", "wrong_parity")
    assert done.returncode == 1 and "--only wrong_parity --limit 0.1" in data["command"]
    assert "* wrong_parity on hopper" in page and "no reason is known" in page


def test_every_fault_has_its_meaning_from_the_header(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import gpu_stress

    assert gpu_stress.meanings().keys() >= gpu_stress.FAULTS.keys()
    assert {fault for fault, _ in gpu_stress.BLIND} <= gpu_stress.FAULTS.keys()


# Prints what a log of compute-sanitizer holds: one finding for the checks whose command has the word.
SANITIZER = """#!{python}
import pathlib, sys
at = sys.argv.index("--log-file")
log, command = pathlib.Path(sys.argv[at + 1]), sys.argv[at + 2 :]
found = any(word in " ".join([*command, *sys.argv[:at]]) for word in {words})
log.write_text("========= Error: Race reported\\n=========     at f in x.cuh:1\\n=========\\n" if found else "")
print("RIGHT" if "linear_stress" in command[0] else "PASSED")
sys.exit(9 if found else 0)
"""
CONTROLS = ("copy_not_awaited", "sums_not_awaited", "barrier_probe")


@pytest.mark.parametrize(("words", "code"), [(CONTROLS, 0), (CONTROLS[:2], 1), ((*CONTROLS, "--seed 11"), 1)])
def test_a_finding_that_is_not_explained_and_a_silent_control_are_failures(tmp_path, words, code):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SANITIZER.format(python=sys.executable, words=list(words)))
    tool.chmod(0o755)
    record = tmp_path / "h200-sanitizer"
    command = [
        sys.executable,
        TOOLS / "gpu_sanitize.py",
        "build",
        tmp_path / "logs",
        "--faults",
        "faults/linear_stress",
    ]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        [*map(str, command), "--record", str(record)], capture_output=True, text=True, env=environment
    )
    page = record.with_suffix(".md").read_text()
    assert done.returncode == code, done.stdout + done.stderr
    assert ("NOT AS IT SHOULD BE" in page) == bool(code)
    (row,) = (line for line in page.splitlines() if line.startswith("| racecheck_sums_not_awaited "))
    assert "| 6 cases on strips with `sums_not_awaited` |" in row and "| 1 | reported, as it must be |" in row


# What git describe and nvidia-smi print -> commit, dirty, card, driver, power limit of a record.
PROVENANCE = {
    "clean": ("abc1234", "NVIDIA H200, 580.1, 700.00 W", ("abc1234", False, "NVIDIA H200", "580.1", "700.00 W")),
    "changed": ("abc1234-dirty", "A, 1, [N/A]", ("abc1234", True, "A", "1", "[N/A]")),
    "neither": (None, None, ("unknown", None, "unknown", "unknown", "unknown")),
}


@pytest.mark.parametrize("case", PROVENANCE)
def test_a_record_tells_uncommitted_changes_and_the_power_limit(tmp_path, monkeypatch, case):
    commit, card, expected = PROVENANCE[case]
    for name, text in (("git", commit), ("nvidia-smi", card)):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho '{text}'\n" if text else "#!/bin/sh\nexit 1\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("NYBBLE_COMMIT", raising=False)
    monkeypatch.syspath_prepend(str(TOOLS))
    import gpu_record

    data = gpu_record.provenance()
    assert tuple(data[key] for key in ("commit", "dirty", "gpu", "driver", "power_limit")) == expected
    page = "\n".join(gpu_record.heading(data | {"question": "?", "command": "c", "cores": 2, "seconds": 1.0}, "t", "n"))
    assert ("with uncommitted changes" in page) == bool(data["dirty"]) and f"power limit {expected[-1]}" in page
    monkeypatch.setenv("NYBBLE_COMMIT", "f00")
    assert [gpu_record.provenance()[key] for key in ("commit", "dirty")] == ["f00", None]
