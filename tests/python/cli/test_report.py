"""inspect and doctor: what they print agrees with what safetensors and Python see."""

import json
import os
import re
import sys

import pytest
import torch
from safetensors.torch import load_file

from .conftest import save_model


def test_inspect_counts_every_byte(nybble, source, tmp_path):
    store = tmp_path / "store"
    assert nybble("quantize", source, store, "--exclude", "*.o_proj").returncode == 0
    tensors = {}
    for path in store.glob("*.safetensors"):
        tensors.update(load_file(path))
    real = {name: tensor for name, tensor in tensors.items() if ".padding." not in name}
    report = json.loads(nybble("inspect", "--json", store).stdout)
    total = report["total"]
    assert total["quantized"] == 3 * 6
    assert total["quantized_bytes"] + total["dense_bytes"] == sum(t.numel() * t.element_size() for t in real.values())
    assert [layer["name"] for layer in report["layers"]] == ["", "model.layers.0", "model.layers.1", "model.layers.2"]
    assert sum(layer["quantized_bytes"] for layer in report["layers"]) == total["quantized_bytes"]
    weights = {weight["name"]: weight for weight in report["weights"]}
    up = weights["model.layers.1.mlp.up_proj.weight"]
    assert up["shape"] == [200, 96]
    assert up["packed_bytes"] == 200 * 96 // 2
    assert (up["quant_type"], up["block_size"], up["dtype"], up["nested"]) == ("nf4", 64, "bfloat16", True)
    table = nybble("inspect", store).stdout
    assert "model.layers.2" in table
    assert "nf4/64 nested" in table


def test_inspect_reads_dense_checkpoints(nybble, tmp_path):
    model = save_model(tmp_path / "dense")
    total = json.loads(nybble("inspect", "--json", tmp_path / "dense").stdout)["total"]
    assert total["quantized"] == 0
    assert total["dense_elements"] == sum(p.numel() for p in model.parameters())
    assert total["bits_per_weight"] == 16


def test_doctor_says_what_the_machine_has(nybble):
    report = json.loads(nybble("doctor", "--json").stdout)
    assert report["memory"]["page_bytes"] == os.sysconf("SC_PAGE_SIZE")
    assert report["memory"]["bytes"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/cpuinfo") as file:
        flags = file.read()
    if "x86" in os.uname().machine:
        assert ("avx2" in report["cpu"]["features"]) == (" avx2 " in flags)
    text = nybble("doctor").stdout
    if not report["cuda"]["built"]:
        assert "built without CUDA" in text
    for gpu in report["cuda"]["gpus"]:
        assert gpu["name"] in text


def machine(**changes) -> dict:
    """A report as --json writes it, of a machine where everything works."""
    report = {
        "version": "0.1.0",
        "cpu": {"model": "some CPU", "threads": 8, "features": ["sse4.2", "avx2", "fma"], "avx2": True},
        "memory": dict.fromkeys(("bytes", "available_bytes"), 2**34)
        | {"control_group_limit_bytes": -1, "lockable_bytes": -1, "page_bytes": 4096},
        "driver": "NVRM version: 580.82",
        "cuda": {
            "built": True,
            "runtime_version": 13000,
            "driver_version": 13000,
            "targets": "75 80 86 89 90a 100 120",
            "problem": "",
            "gpus": [gpu("NVIDIA H200", 90)],
        },
        "python": {"program": "python3", "version": "3.11.7", "torch": "2.11.0", "torch_cuda": "13.0", "problem": ""},
    }
    for part, values in changes.items():
        report[part] |= values
    return report


def gpu(name: str, capability: int) -> dict:
    return {
        "name": name, "compute_capability": capability, "multiprocessors": 40, "memory_bytes": 2**34, "copy_engines": 3
    }  # fmt: skip


MACHINES = [
    ({}, []),
    ({"cuda": {"gpus": [gpu("A100", 80), gpu("RTX 5090", 120)]}}, []),
    (
        {"cuda": {"gpus": [gpu("Tesla T4", 75)]}},
        ["Tesla T4 has compute capability 7.5, and the fused multiply needs 8.0"],
    ),
    (
        {"cuda": {"gpus": [gpu("Tesla V100", 70)]}},
        ["this nybble has code for 7.5, 8.0, 8.6, 8.9, 9.0, 10.0, 12.0 only"],
    ),
    ({"cuda": {"driver_version": 12080, "gpus": []}}, ["takes CUDA up to 12.8, but.*13.0; update the driver .580"]),
    ({"cuda": {"driver_version": 0, "gpus": [], "problem": "no device"}}, []),
    ({"cpu": {"avx2": False}}, ["no AVX2"]),
    (
        {"python": {"torch": "2.11.0+cpu", "torch_cuda": ""}},
        ["there is a GPU, but torch 2.11.0.cpu is built without CUDA"],
    ),
    ({"python": {"problem": "torch 2.9.1 found"}, "cpu": {"avx2": False}}, ["no AVX2", "python3: torch 2.9.1 found"]),
]


@pytest.mark.parametrize(("changes", "words"), MACHINES)
def test_doctor_explains_machines_that_are_not_here(nybble, tmp_path, changes, words):
    file = tmp_path / "report.json"
    file.write_text(json.dumps(machine(**changes)))
    text = nybble("doctor", "--read", file).stdout
    said = [line.removeprefix("note     ") for line in text.splitlines() if line.startswith("note ")]
    assert len(said) == len(words), text
    for found, expected in zip(said, words, strict=True):
        assert re.search(expected, found), text
    again = json.loads(nybble("doctor", "--read", file, "--json").stdout)
    assert again.pop("notes") == said and again == machine(**changes)


def test_doctor_reads_its_own_report(nybble, tmp_path):
    file = tmp_path / "report.json"
    file.write_text(nybble("doctor", "--json").stdout)
    assert nybble("doctor", "--read", file, "--json").stdout == file.read_text()
    file.write_text('{"version": 1}')
    done = nybble("doctor", "--read", file)
    assert done.returncode == 3 and str(file) in done.stderr and "doctor --json" in done.stderr


def python_path(*folders) -> dict:
    return {
        "NYBBLE_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(map(str, [*folders, *filter(None, sys.path)])),
    }


def test_doctor_asks_python_for_its_torch(nybble, tmp_path):
    def notes(env):
        return json.loads(nybble("doctor", "--json", env=env).stdout)["notes"]

    report = json.loads(nybble("doctor", "--json", env=python_path()).stdout)
    assert report["python"]["torch"] == torch.__version__ and report["python"]["problem"] == ""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text('__version__ = "2.9.1+cu128"')
    (said,) = notes(python_path(tmp_path))
    assert said.endswith("torch 2.9.1+cu128 found, nybble needs 2.10 or newer: pip install -U torch")
    (said,) = notes({"NYBBLE_PYTHON": "no-such-python"})
    assert said.startswith("no-such-python: there is no such program")
    (said,) = notes({"NYBBLE_PYTHON": "false"})
    assert said.startswith("false: ended with exit code 1")


def test_progress_has_rate_and_time_left(nybble, source, tmp_path):
    result = nybble("quantize", source, tmp_path / "store")
    assert "100%" in result.stderr
    assert "/s  ETA " in result.stderr
    quiet = nybble("quantize", "--quiet", source, tmp_path / "quiet")
    assert quiet.stderr == ""
