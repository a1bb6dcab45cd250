"""transformers + bitsandbytes load a store as it is, and multiply by exactly the weights that its bytes mean."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from .conftest import save_model

bnb = pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(24).reshape(2, 12)
NP_DTYPE = {torch.float32: np.float32, torch.float16: np.float16}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors.update(load_file(path))
    return tensors


def dequantized(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The weight in its state's dtype, from the format's definition: table * scale in fp32, one rounding."""
    key = next(k for k in tensors if k.startswith(name + ".quant_state."))
    state = json.loads(tensors[key].numpy().tobytes())
    packed = tensors[name].numpy().reshape(-1)
    codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)
    scales = tensors[name + ".absmax"].numpy()
    if "nested_offset" in state:
        nested = np.repeat(tensors[name + ".nested_absmax"].numpy(), 256)[: scales.size]
        scales = tensors[name + ".nested_quant_map"].numpy()[scales] * nested + np.float32(state["nested_offset"])
    count = int(np.prod(state["shape"]))
    values = tensors[name + ".quant_map"].numpy()[codes[:count]] * np.repeat(scales, state["blocksize"])[:count]
    assert values.dtype == np.float32
    return torch.from_numpy(values).reshape(state["shape"]).to(getattr(torch, state["dtype"]))


def load(folder: Path, **options):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"], "the loader would warn"
    assert not info["mismatched_keys"]
    return model.eval()


@pytest.mark.parametrize(
    ("dtype", "options", "changes"),
    [
        (torch.bfloat16, [], {}),
        (torch.bfloat16, ["--quant-type", "fp4", "--block-size", "128"], {}),
        (torch.float16, ["--no-nested"], {}),
        (torch.float32, ["--block-size", "32"], {}),
        (torch.bfloat16, ["--exclude", "*.o_proj", "--exclude", "model.layers.1.*"], {}),
        (torch.bfloat16, [], {"tie_word_embeddings": True}),
        (torch.bfloat16, [], {"attention_bias": True, "mlp_bias": True}),
        (torch.bfloat16, ["--include", "*_proj", "--include", "lm_head"], {}),
    ],
    ids=["bf16", "fp4", "fp16-plain", "fp32", "exclude", "tied", "bias", "head"],
)
@torch.no_grad()
def test_store_loads_and_means_its_bytes(nybble, tmp_path, dtype, options, changes):
    dense = save_model(tmp_path / "source", dtype=dtype, **changes)
    result = nybble("quantize", tmp_path / "source", tmp_path / "store", *options)
    assert result.returncode == 0, result.stderr
    assert nybble("verify", tmp_path / "store").returncode == 0
    loaded = load(tmp_path / "store", dtype=dtype)
    tensors = tensors_of(tmp_path / "store")
    quantized = [name for name in tensors if name + ".absmax" in tensors]
    expected = 3 * 7 if not options or options[0] != "--exclude" else 2 * 6
    assert len(quantized) == expected + ("lm_head" in options)
    original = dense(TOKENS).logits
    changed = 0
    for name in quantized:
        weight = dequantized(tensors, name)
        stored = loaded.get_parameter(name)
        assert isinstance(stored, bnb.nn.Params4bit), name
        assert torch.equal(bnb.functional.dequantize_4bit(stored.data, stored.quant_state), weight), name
        changed += not torch.equal(dense.get_parameter(name), weight)
        dense.get_parameter(name).data.copy_(weight)
    assert changed == len(quantized)
    reference = dense(TOKENS).logits
    logits = loaded(TOKENS).logits
    assert torch.equal(logits, reference)
    assert not torch.equal(logits, original), "control: 4 bits change something"


@pytest.mark.parametrize("storage", ["uint8", "bfloat16", "float32"])
@torch.no_grad()
def test_bitsandbytes_checkpoints_keep_their_bytes(nybble, source, tmp_path, storage):
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=storage,
    )
    theirs = load(source, dtype=torch.bfloat16, quantization_config=config)
    # Small shards: the parts of a weight end up in different files.
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="4KB")
    assert nybble("verify", tmp_path / "theirs").returncode == 0
    assert nybble("quantize", tmp_path / "theirs", tmp_path / "store").returncode == 0
    assert nybble("verify", tmp_path / "store").returncode == 0
    before, after = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "store")
    assert {key for key in after if ".padding." not in key} == set(before)
    for key, tensor in before.items():
        assert torch.equal(tensor.view(torch.uint8).reshape(-1), after[key].view(torch.uint8).reshape(-1)), key
    ours = load(tmp_path / "store", dtype=torch.bfloat16)
    assert torch.equal(ours(TOKENS).logits, theirs(TOKENS).logits)


@torch.no_grad()
def test_json_is_spelled_as_bitsandbytes_spells_it(nybble, source, tmp_path):
    assert nybble("quantize", source, tmp_path / "store").returncode == 0
    loaded = load(tmp_path / "store", dtype=torch.bfloat16)
    tensors = tensors_of(tmp_path / "store")
    compared = 0
    for name, module in loaded.named_modules():
        if not isinstance(module, bnb.nn.Linear4bit):
            continue
        for key, value in module.weight.quant_state.as_dict(packed=True).items():
            ours = tensors[f"{name}.weight.{key}"]
            assert ours.dtype == value.dtype, key
            assert torch.equal(ours, value), key
            compared += 1
    assert compared == 3 * 7 * 5


def test_layers_are_aligned_runs_of_bytes(nybble, source, tmp_path):
    assert nybble("quantize", source, tmp_path / "store").returncode == 0
    layers = 0
    for path in sorted((tmp_path / "store").glob("*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        assert (8 + length) % 4096 == 0
        header = json.loads(data[8 : 8 + length])
        with safe_open(path, "pt") as file:
            assert set(file.keys()) == set(header) - {"__metadata__"}
        views = [name for name in header if name.endswith((".absmax", ".nested_absmax")) or name + ".absmax" in header]
        starts = [header[name]["data_offsets"][0] for name in views]
        assert all(start % 256 == 0 for start in starts)
        if not views:
            continue
        layers += 1
        assert len({name.split(".self_attn")[0].split(".mlp")[0] for name in views}) == 1, "one layer a file"
        assert min(starts) == 0, "the layer begins where the data does"
        end = max(header[name]["data_offsets"][1] for name in views)
        inside = [name for name, entry in header.items() if name != "__metadata__" and entry["data_offsets"][0] < end]
        assert all(name in views or ".padding." in name for name in inside)
    assert layers == 3
