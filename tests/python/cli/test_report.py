"""inspect and doctor: what they print agrees with what safetensors and Python see."""

import json
import os

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


def test_progress_has_rate_and_time_left(nybble, source, tmp_path):
    result = nybble("quantize", source, tmp_path / "store")
    assert "100%" in result.stderr
    assert "/s  ETA " in result.stderr
    quiet = nybble("quantize", "--quiet", source, tmp_path / "quiet")
    assert quiet.stderr == ""
