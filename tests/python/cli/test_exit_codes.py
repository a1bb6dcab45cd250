"""Every exit code of the command, with what it says. The table is that of docs/command.md."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from .conftest import BUILD, digest

HOLD_LOCK = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print(1, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store(nybble, source, tmp_path):
    result = nybble("quantize", source, tmp_path / "store")
    assert result.returncode == 0, result.stderr
    return tmp_path / "store"


def test_0_on_success(nybble, store):
    for arguments in (
        ["verify", store],
        ["inspect", store],
        ["doctor"],
        ["--version"],
        ["--help"],
        ["quantize", "--help"],
    ):
        result = nybble(*arguments)
        assert result.returncode == 0, result.stderr
        assert result.stdout


def test_1_when_verify_finds_faults(nybble, store):
    shard = store / "model-00002-of-00004.safetensors"
    data = bytearray(shard.read_bytes())
    with open(store / "config.json") as file:
        config = json.load(file)
    config["quantization_config"]["load_in_4bit"] = False
    (store / "config.json").write_text(json.dumps(config))
    data[-2] = ord("!")  # the last JSON of the layer
    shard.write_bytes(data)
    result = nybble("verify", "--json", store)
    assert result.returncode == 1
    report = json.loads(result.stdout)
    assert report["status"] == "faults"
    assert len(report["faults"]) == 2
    assert {"subject", "found", "expected", "remedy"} == set(report["faults"][0])
    text = nybble("verify", store)
    assert text.returncode == 1
    assert text.stdout.count("fault: ") == 2


@pytest.mark.parametrize(
    "line",
    [
        "",
        "quantise a b",
        "quantize a",
        "quantize a b --block-size 63",
        "quantize a b --quant-type nf5",
        "quantize a b --threads 0",
        "verify",
        "verify a --jason",
    ],
)
def test_2_when_the_command_line_is_wrong(nybble, line):
    result = nybble(*line.split())
    assert result.returncode == 2
    assert result.stderr


def test_3_when_the_input_is_bad(nybble, source, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    shard = next(broken.glob("model-00002-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    result = nybble("quantize", broken, tmp_path / "store")
    assert result.returncode == 3
    assert shard.name in result.stderr
    assert "fetch" in result.stderr
    assert not (tmp_path / "store").exists()
    assert not (tmp_path / "store.partial").exists()


def test_3_when_the_index_names_a_missing_shard(nybble, source, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    next(broken.glob("model-00002-*")).unlink()
    result = nybble("quantize", broken, tmp_path / "store")
    assert result.returncode == 3
    assert "no such file" in result.stderr


def test_3_when_a_uint8_tensor_is_to_be_quantised(nybble, source, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    shard = next(path for path in sorted(broken.glob("model-*")) if any("up_proj" in key for key in load_file(path)))
    tensors = load_file(shard)
    name = next(key for key in tensors if "up_proj" in key)
    tensors[name] = tensors[name].to(dtype=torch.uint8)
    save_file(tensors, shard)
    result = nybble("quantize", broken, tmp_path / "store")
    assert result.returncode == 3
    assert name in result.stderr
    assert "U8" in result.stderr


def test_4_when_the_system_refuses(nybble, tmp_path):
    for command in (
        ["verify", tmp_path / "nowhere"],
        ["inspect", tmp_path / "nowhere"],
        ["quantize", tmp_path / "nowhere", tmp_path / "out"],
    ):
        result = nybble(*command)
        assert result.returncode == 4, command
        assert "does not exist" in result.stderr


def test_4_and_5_when_the_disk_is_full_then_nothing_is_lost(nybble, source, store, tmp_path):
    shim = BUILD / "tests" / "cpp" / "store" / "libfull_disk.so"
    if not shim.exists():
        pytest.skip(f"{shim} was not built")
    target = tmp_path / "full"
    full = {"LD_PRELOAD": str(shim.resolve()), "NYBBLE_TEST_DISK_BYTES": "150000"}
    result = nybble("quantize", source, target, env=full)
    assert result.returncode == 4
    assert "No space left on device" in result.stderr
    assert "resume with" in result.stderr
    assert not target.exists()
    for command in ("verify", "inspect"):
        note = nybble(command, target)
        assert note.returncode == 5
        assert "incomplete" in note.stdout + note.stderr
    report = json.loads(nybble("verify", "--json", target).stdout)
    assert report["status"] == "incomplete"
    assert "resume with `nybble quantize" in report["note"]
    resumed = nybble("quantize", source, target)
    assert resumed.returncode == 0
    assert "(0 from an interrupted run)" not in resumed.stdout
    assert digest(target) == digest(store)


def test_6_when_the_destination_exists(nybble, source, store):
    before = digest(store)
    result = nybble("quantize", source, store)
    assert result.returncode == 6
    assert "exists" in result.stderr
    assert digest(store) == before


def test_6_when_another_process_is_writing(nybble, source, tmp_path):
    partial = tmp_path / "store.partial"
    partial.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(partial)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        holder.stdout.readline()
        result = nybble("quantize", source, tmp_path / "store")
        assert result.returncode == 6
        assert "another nybble" in result.stderr
    finally:
        holder.communicate()
    assert nybble("quantize", source, tmp_path / "store").returncode == 0


def test_7_for_models_with_transposed_weights(nybble, source, tmp_path):
    copy = tmp_path / "gpt2"
    shutil.copytree(source, copy)
    (copy / "config.json").write_text('{"model_type": "gpt2"}')
    result = nybble("quantize", copy, tmp_path / "store")
    assert result.returncode == 7
    assert "[in, out]" in result.stderr
