"""The forecast: bounds, advice, bad input and the command, without weights."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

import nybble
from nybble.planning import __main__ as command
from nybble.planning import rates, source, speed, trace
from nybble.planning.machine import parse_bytes

RATES = dict(link_gb_s=10.0, gemm_tflops=50.0, memory_gb_s=500.0)
ROOMY = dict(host_memory="64GiB", context="256MiB", **RATES)


def plan(folder, **options):
    return nybble.plan_training(folder, **({"tokens": 256, "rank": 8} | ROOMY | options))


@pytest.mark.parametrize("window,copied", [(1, 2 * 3), (2, 2 * 2), (3, 2 * 1), (4, 0), (9, 0)])
def test_a_batch_copies_twice_what_the_slots_do_not_hold(window, copied):
    assert speed.link_bytes([100] * 4, window) == 100 * copied


def test_layers_of_different_size_count_with_their_own_bytes():
    # forward: layers 2 and 3 come anew; backward: layers 1 and 0
    assert speed.link_bytes([1, 10, 100, 1000], 2) == 1100 + 11


def test_operations_by_hand(folder):
    found = source.read(folder())
    base = 256 * (256 + 128 + 128 + 256) + 3 * 256 * 512
    adapters = 8 * (512 + 384 + 384 + 512 + 768 + 768 + 768)
    head, attention = 4 * 8192 * 256, 2 * 4 * 64 * 128  # a token; rows of 128
    recompute = 4 * (2 * 3 * base + 2 * 4 * adapters + 4.5 * attention) + head
    keep = 4 * (2 * 2 * base + 2 * 3 * adapters + 3.5 * attention) + head
    assert speed.flops(found, trace.Step(256, rows=2, rank=8)) == 256 * recompute
    assert speed.flops(found, trace.Step(256, rows=2, rank=8, keep=4)) == 256 * keep


def test_the_larger_bound_is_named_and_the_crossover_is_where_both_are_equal(folder):
    slow, fast = plan(folder(), link_gb_s=0.1), plan(folder(), link_gb_s=1e6)
    assert (slow.speed.bound, fast.speed.bound) == ("link", "compute")
    assert slow.speed.link_s == pytest.approx(2 * 2 * slow.source.slot_bytes / 0.1e9)
    rows = slow.speed.tokens_to_hide // 256  # as long as before
    there = plan(folder(), tokens=256 * rows, batch=rows, link_gb_s=0.1)
    assert there.speed.compute_s == pytest.approx(slow.speed.link_s, rel=2 / rows)
    assert any("waits for the link" in line for line in slow.advice)
    assert not any("waits for the link" in line for line in fast.advice)


def test_fusing_that_does_not_pay_is_said(folder):
    hidden = plan(folder(), link_gb_s=0.01)
    assert any("dequantising would hide behind the copies" in line for line in hidden.advice)
    small = plan(folder(), link_gb_s=1e6, memory_gb_s=1e6)
    assert any("Fusing hardly pays" in line for line in small.advice)
    large = plan(folder(), link_gb_s=1e6, memory_gb_s=1.0)
    assert any("Dequantising before each multiply would take" in line for line in large.advice)


def test_a_model_that_fits_resident_need_not_stream(folder):
    assert any("Streaming does not pay here" in line for line in plan(folder(), gpu_memory="8GiB").advice)
    large = folder(intermediate_size=32768)  # two layers more are 26 MiB
    model = plan(large)
    between = (model.device_bytes + model.resident.reserved + model.machine.context_bytes) // 2
    tight = plan(large, gpu_memory=between)
    assert tight.fits and not any("does not pay here" in line for line in tight.advice)


def test_what_does_not_fit_comes_with_changes_that_do(folder):
    needs = plan(folder(), tokens=2048)
    chunked = plan(folder(), tokens=2048, loss="chunked")
    room = (needs.device_bytes + chunked.device_bytes) // 2
    found = plan(folder(), tokens=2048, gpu_memory=room)
    assert found.fits is False
    advice = "\n".join(found.advice)
    assert "loss=chunked (nybble.chunk_loss) alone:" in advice and "fits" in advice
    most = next(int(line.split("=")[1].split()[0]) for line in found.advice if line.startswith("tokens="))
    assert plan(folder(), tokens=most, gpu_memory=room).fits
    assert plan(folder(), tokens=most + 64, gpu_memory=room).fits is False
    hopeless = plan(folder(), gpu_memory="260MiB")
    assert "No number of tokens alone makes it fit." in hopeless.advice


def test_host_memory_that_does_not_suffice_is_said(folder):
    assert any("Host memory does not suffice" in line for line in plan(folder(), host_memory="1MiB").advice)


def test_rates_are_given_or_assumed_and_say_so(folder, monkeypatch):
    monkeypatch.setattr(rates, "card", lambda: None)
    found = rates.rates({"link_gb_s": 20.0, "gemm_tflops": None, "memory_gb_s": None}, 64, (64, 64))
    assert found.link_gb_s == 20 and found.gemm_tflops == rates.ASSUMED["gemm_tflops"]
    assert found.origin == {"link_gb_s": "given", "gemm_tflops": "assumed", "memory_gb_s": "assumed"}
    assert "12.0 GB/s (assumed)" in str(plan(folder(), link_gb_s=None))


BAD = {
    "tokens": (dict(tokens=0), "tokens is 0, expected a whole number from 1 on"),
    "rows": (dict(tokens=10, batch=3), "tokens is 10, expected a multiple of batch, 3"),
    "rank": (dict(rank=-1), "rank is -1"),
    "size": (dict(gpu_memory="8 bananas"), "gpu_memory is '8 bananas', expected a size such as 8GiB"),
    "zero": (dict(gpu_memory="0GiB"), "gpu_memory is '0GiB'"),
    "loss": (dict(loss="half"), "loss is 'half', expected one of whole, chunked"),
    "activations": (dict(activations="some"), "activations is 'some'.* of 4 layers"),
    "too many": (dict(activations=5), "how many of 4 layers keep"),
    "optimiser": (dict(optimiser="lion"), "optimiser is 'lion', expected one of adamw"),
    "targets": (dict(targets="qkv"), "targets has qkv, expected some of down_proj"),
    "rate": (dict(link_gb_s=0.0), "link_gb_s is 0.0, expected a rate above 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_options_that_do_not_fit_are_refused(folder, case):
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        plan(folder(), **options)


def test_folders_that_are_no_model_are_refused(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json, expected a store"):
        plan(tmp_path / "nowhere")
    broken = folder()
    (broken / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not a config that transformers reads"):
        plan(broken)
    with pytest.raises(ValueError, match="model_type 'gpt2', expected one of llama"):
        plan(folder(model_type="gpt2"))
    with pytest.raises(ValueError, match="quantised by 'gptq', expected bitsandbytes"):
        plan(folder(quantization_config={"quant_method": "gptq", "bits": 4}))
    for content, message in ((b"\0" * 4, "is no safetensors file"), (struct.pack("<Q", 9) + b"not json!", "not JSON")):
        damaged = folder()
        (damaged / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            plan(damaged)
    split = folder()
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ValueError, match=r"names gone\.safetensors, which is missing"):
        plan(split)


def test_a_store_counts_with_the_sizes_of_its_headers(folder):
    """Plain scales: four bytes a block instead of one, and no nested ones."""
    quantization = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_compute_dtype="float16")
    store, dense = folder(quantization_config=quantization, tie_word_embeddings=True), source.read(folder())
    tensors = {"model.embed_tokens.weight": torch.zeros(8192, 256, dtype=torch.float16)}
    for layer, shapes in enumerate(dense.layers):
        for path, (n, k) in shapes.items():
            name = f"model.layers.{layer}.{path}.weight"
            tensors |= {
                name: torch.zeros(n * k // 2, 1, dtype=torch.uint8),
                f"{name}.absmax": torch.zeros(n * k // 64),
                f"{name}.quant_state.bitsandbytes__nf4": torch.zeros(3, dtype=torch.uint8),
            }
    save_file(tensors, store / "model.safetensors")
    found = source.read(store)
    assert found.quantised and not dense.quantised
    assert found.compute_dtype == found.resident_dtype == torch.float16
    assert found.layer_bytes == [sum(n * k // 2 + n * k // 16 for n, k in found.layers[0].values())] * 4
    del tensors["model.layers.2.mlp.up_proj.weight.absmax"]
    save_file(tensors, store / "model.safetensors")
    with pytest.raises(ValueError, match=r"no tensor model\.layers\.2\.mlp\.up_proj\.weight\.absmax"):
        source.read(store)


def test_the_command_prints_a_table_or_json_and_its_exit_code_says_whether_it_fits(folder, capsys, monkeypatch):
    flags = ["--tokens", "256", "--rank", "8", "--host-memory", "64GiB", "--context", "256MiB"]
    flags += ["--link-gb-s", "0.1", "--gemm-tflops", "50", "--memory-gb-s", "500"]
    assert command.main([str(folder()), "--gpu-memory", "8GiB", *flags]) == 0
    text = capsys.readouterr().out
    for line in ("embedding", "head", "logits and loss", "kept activations", "slots", "workspaces", "adapters"):
        assert line in text
    assert "fits in 8.00 GiB" in text and "bound by the link" in text
    assert "page-locked: the packed base" in text and "pageable: largest tensor while loading" in text
    assert "GB at 0.1 GB/s (given)" in text and "TFLOP at 50 TFLOP/s (given)" in text
    assert command.main([str(folder()), "--gpu-memory", "300MiB", "--json", *flags]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["device"]["fits"] is False and found["device"]["available"] == 300 << 20
    assert sum(found["device"]["lines"].values()) == found["device"]["allocated"] <= found["device"]["reserved"]
    assert command.main([str(folder()), "--tokens", "0"]) == 3
    assert "nybble plan: tokens is 0" in capsys.readouterr().err
    assert command.main(["nowhere"]) == 4


def test_sizes_in_words():
    assert parse_bytes("8GiB", "x") == 8 << 30 and parse_bytes("1.5 gb", "x") == 1_500_000_000
    assert parse_bytes(None, "x") is None and parse_bytes(7, "x") == 7
