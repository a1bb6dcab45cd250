"""SIGKILL at random moments never leaves a torn store, and the resumed result has the bytes of an uninterrupted run."""

import json
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from .conftest import command_path, digest, save_model

KILLS = 100
SEED = 20240607


@pytest.fixture(scope="module")
def larger_source(tmp_path_factory) -> Path:
    """12 layers, so that a run has many files to be killed in."""
    folder = tmp_path_factory.mktemp("model") / "source"
    save_model(folder, num_hidden_layers=12, hidden_size=256, intermediate_size=688, shard="3MB")
    return folder


def state_of(nybble, target: Path) -> str:
    """What a kill left behind, in the words of `nybble verify`; anything else fails the test."""
    result = nybble("verify", target)
    partial = target.with_name(target.name + ".partial")
    if result.returncode == 0:
        return "complete"
    if result.returncode == 5:
        assert "incomplete" in result.stdout
        assert "resume with `nybble quantize" in result.stdout
        assert not target.exists()
        return "incomplete"
    assert result.returncode == 4, f"a torn store:\n{result.stdout}{result.stderr}"
    assert "does not exist" in result.stderr
    assert not target.exists()
    assert not partial.exists()
    return "not begun"


def test_kills_lose_nothing(nybble, larger_source, tmp_path, capsys):
    reference = tmp_path / "reference"
    begin = time.monotonic()
    assert nybble("quantize", larger_source, reference).returncode == 0
    whole_run = time.monotonic() - begin
    expected = digest(reference)
    moments = random.Random(SEED)
    states, kills, episodes, finished = Counter(), 0, 0, 0
    while kills < KILLS:
        target = tmp_path / f"store{episodes}"
        episodes += 1
        while not target.exists():
            threads = moments.choice([1, 2, 3])
            process = subprocess.Popen(
                [command_path(), "quantize", "--quiet", f"--threads={threads}", larger_source, target],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            delay = moments.uniform(0, whole_run)
            try:
                process.wait(timeout=delay if kills < KILLS else 300)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                state = state_of(nybble, target)
                states[state] += 1
                kills += state != "not begun"
                continue
            assert process.returncode == 0, process.stderr.read()
            finished += 1
        assert state_of(nybble, target) == "complete"
        assert digest(target) == expected
        subprocess.run(["rm", "-rf", str(target), f"{target}.partial"], check=True)
    with capsys.disabled():
        print(f"\n  {kills} kills in {episodes} conversions of {whole_run:.2f} s: {dict(states)}, {finished} ended")
    assert kills >= KILLS
    assert states["incomplete"] > 0


def test_the_digest_sees_a_flipped_bit(nybble, larger_source, tmp_path):
    assert nybble("quantize", larger_source, tmp_path / "store").returncode == 0
    before = digest(tmp_path / "store")
    shard = tmp_path / "store" / "model-00003-of-00013.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert digest(tmp_path / "store") != before


def test_resume_keeps_finished_files(nybble, larger_source, tmp_path):
    target, reference = tmp_path / "store", tmp_path / "reference"
    process = subprocess.Popen(
        [command_path(), "quantize", "--quiet", larger_source, target], stdout=subprocess.DEVNULL
    )
    done = Path(f"{target}.partial/store/model-00002-of-00013.safetensors")
    while not done.exists() and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    process.wait()
    if target.exists():
        pytest.skip("the run was faster than the kill")
    stamp = done.stat().st_mtime_ns
    assert nybble("quantize", larger_source, target).returncode == 0
    assert (target / done.name).stat().st_mtime_ns == stamp
    assert nybble("quantize", larger_source, reference).returncode == 0
    assert digest(target) == digest(reference)


def peak_resident_bytes(process: subprocess.Popen) -> int:
    """Waits for the process. Its own high-water mark: that of rusage starts with the parent's."""
    peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        marks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
        peak = max([peak, *(int(mark) * 1024 for mark in marks)])
        time.sleep(0.002)
    process.wait()
    return peak


def test_peak_memory_is_bounded_by_pieces(tmp_path):
    """A checkpoint of 384 MiB is converted in much less memory than it has bytes."""
    folder = tmp_path / "source"
    folder.mkdir()
    weight = torch.randn(4096, 6144, dtype=torch.bfloat16)
    save_file({f"model.layers.{i}.mlp.up_proj.weight": weight + i for i in range(8)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    process = subprocess.Popen([command_path(), "quantize", "--quiet", folder, tmp_path / "store"])
    peak = peak_resident_bytes(process)
    assert process.returncode == 0
    assert 32e6 < peak < 120e6, "pages of the source are given back as they are used up"
