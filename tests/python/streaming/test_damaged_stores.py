"""Stores that are damaged: each is refused by name, and the model that was to stream is as it was."""

import dataclasses
import json
import shutil

import pytest
import torch
import transformers
from store_faults import FAULTS, GOOD, KEY, MODULE, PLAIN_FAULTS, REMEDY, damaged, plain, state, without
from tiny_models import LAYERS, assert_equal, checkpointed, resident_model, step, with_adapters

import nybble
from nybble.streaming.store import CheckpointStore
from nybble.streaming.stored_state import require_finite_scales

LATE = {"poison": True, "land_at_wait": True}


def whole_message(tensor: str, found: str, expected: str, message: str) -> bool:
    return (
        message.startswith(f"{tensor}: found ")
        and REMEDY in message
        and all(words in message.removesuffix(REMEDY) for words in (found, f", expected {expected}"))
    )


def everything(model) -> dict:
    """What streaming changes: classes, parameters and buffers, values set on modules, the config."""
    seen = {"config": model.config.to_dict()}
    for name, module in model.named_modules():
        own = {**module._parameters, **module._buffers}
        tensors = {key: (id(t), t.device, t._version) for key, t in own.items() if t is not None}
        seen[name] = type(module), tensors, sorted(vars(module))
    return seen


def refusal(model, store, device) -> str:
    """The message with which a store is refused; the model is as before."""
    before = everything(model)
    with pytest.raises(ValueError) as raised:
        nybble.stream(model, store, device=device, **LATE)
    assert everything(model) == before
    return str(raised.value)


@pytest.fixture
def on_meta(stores):
    config = transformers.AutoConfig.from_pretrained(stores())
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("fault", [*FAULTS, *PLAIN_FAULTS])
def test_a_damaged_store_is_refused_by_tensor_and_field(stores, on_meta, tmp_path, fault):
    change, *words = (FAULTS | PLAIN_FAULTS)[fault]

    def both(tensors):
        if fault in PLAIN_FAULTS:
            plain(tensors)
        change(tensors)

    message = refusal(on_meta, damaged(stores(), tmp_path / "store", both), stores().device)
    assert whole_message(*words, message), message


OTHER_FAULTS = {
    "other shape": (state(shape=[64, 160]), f"{KEY}: found shape [64, 160], expected [160, 64] as in the model; is it"),
    "no norm": (without("model.norm.weight"), "model.norm.weight is on meta and not in the store"),
    "short norm": (
        lambda t: t.update({"model.norm.weight": torch.ones(63)}),
        "expected [64] by the config; check that the store is one of this model",
    ),
    "norm of bytes": (
        lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.uint8)}),
        "expected one of F32, BF16, F16; copy the store again",
    ),
}


@pytest.mark.parametrize("fault", OTHER_FAULTS)
def test_a_store_that_does_not_fit_the_model_is_refused(stores, on_meta, tmp_path, fault):
    change, message = OTHER_FAULTS[fault]
    found = refusal(on_meta, damaged(stores(), tmp_path / "store", change), stores().device)
    assert message in found and found.startswith((KEY, "model.norm.weight"))


FILES = {
    "config cut off": ("config.json", '{"model_type": "llama"', "config.json is not a JSON object"),
    "config a list": ("config.json", "[]", "config.json is not a JSON object"),
    "index of nothing": ("model.safetensors.index.json", "{}", "index.json has no weight_map of file names"),
    "index of numbers": ("model.safetensors.index.json", '{"weight_map": {"a": 1}}', "has no weight_map of file names"),
    "index of a lost file": ("model.safetensors.index.json", '{"weight_map": {"a": "b"}}', "names b, which is missing"),
    "tensors cut off": ("model.safetensors", "{", "model.safetensors"),
}


@pytest.mark.parametrize("fault", FILES)
def test_a_damaged_file_is_refused_by_name(stores, on_meta, tmp_path, fault):
    name, content, message = FILES[fault]
    shutil.copytree(stores(), tmp_path / "store")
    (tmp_path / "store" / name).write_text(content)
    assert message in refusal(on_meta, tmp_path / "store", stores().device)


CONFIGS = {
    "other method": ("quant_method", "gptq", "expected quant_method bitsandbytes"),
    "not 4 bit": ("load_in_4bit", False, "found quantization_config.load_in_4bit False, expected True"),
    "4 bit as text": ("load_in_4bit", "yes", "found quantization_config.load_in_4bit 'yes', expected True"),
    "unknown dtype": ("bnb_4bit_compute_dtype", "floof", "bnb_4bit_compute_dtype 'floof', expected one of float32"),
    "integer dtype": ("bnb_4bit_compute_dtype", "int8", "bnb_4bit_compute_dtype 'int8', expected one of float32"),
    "dtype of a number": ("bnb_4bit_compute_dtype", 4, "bnb_4bit_compute_dtype 4, expected one of float32"),
    "type of a number": ("bnb_4bit_quant_type", 4, "bnb_4bit_quant_type 4, expected 'nf4', as in every weight's state"),
    "type of a list": (
        "bnb_4bit_quant_type",
        ["nf4"],
        "bnb_4bit_quant_type ['nf4'], expected 'nf4', as in every weight's state",
    ),
    "other type": (
        "bnb_4bit_quant_type",
        "fp4",
        "bnb_4bit_quant_type 'fp4', expected 'nf4', as in every weight's state",
    ),
    "flag of a number": ("llm_int8_threshold", "x", "transformers refuses (llm_int8_threshold must be a float)"),
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_a_damaged_quantization_config_is_refused_by_field(stores, on_meta, tmp_path, fault):
    field, value, message = CONFIGS[fault]
    shutil.copytree(stores(), tmp_path / "store")
    path = tmp_path / "store" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"][field] = value
    path.write_text(json.dumps(config))
    found = refusal(on_meta, tmp_path / "store", stores().device)
    assert message in found and str(path) in found


def test_a_config_with_fewer_layers_than_its_store_is_refused_unless_it_is_the_callers(stores, tmp_path):
    shutil.copytree(stores(), tmp_path / "store")
    path = tmp_path / "store" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": LAYERS - 1}))
    wanted = f"config.json: found num_hidden_layers {LAYERS - 1}, expected {LAYERS} as the store has weights of"
    with pytest.raises(ValueError, match=wanted):
        nybble.stream(None, tmp_path / "store", device=stores().device)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "store")
    model = nybble.stream(config, stores(), device=stores().device)
    assert nybble.memory_stats(model)["layers"] == LAYERS - 1


@pytest.mark.parametrize("change", GOOD.values(), ids=GOOD)
def test_the_good_twin_streams(stores, on_meta, tmp_path, change):
    store = type(stores())(damaged(stores(), tmp_path / "store", change))
    store.device = stores().device
    expected = step(checkpointed(with_adapters(resident_model(store))))
    model = nybble.stream(on_meta, store, device=store.device, **LATE)
    assert_equal(step(checkpointed(with_adapters(model))), expected, at_least=4 * LAYERS)


@pytest.mark.parametrize("fault", ["blocksize 0", "NaN in nested absmax", "long packed"])
def test_a_model_in_use_goes_on_after_a_damaged_store(stores, tmp_path, fault):
    model = checkpointed(with_adapters(resident_model(stores())))
    expected = step(model)
    store = damaged(stores(), tmp_path / "store", FAULTS[fault][0])
    assert f"{KEY}" in refusal(model, store, None)
    assert_equal(step(model), expected, at_least=4 * LAYERS)
    assert_equal(step(nybble.stream(model, stores(), **LATE)), expected, at_least=4 * LAYERS)


@pytest.mark.parametrize("code,refused", [(255, ["the scale of block 3 is NaN or Inf"]), (200, [])])
def test_what_is_refused_is_a_scale_that_overflows_not_a_part_that_might(stores, code, refused):
    stored = dataclasses.replace(CheckpointStore(stores()).weight(MODULE), nested_dtype=torch.float16)
    codes = torch.full([stored.blocks], 200, dtype=torch.uint8)
    codes[3] = code  # 255 is 1, 200 is 0.18
    fields = {"absmax": codes, "nested_absmax": torch.full([stored.nested_blocks], 70_000.0)}
    found = []
    require_finite_scales(stored, fields, lambda *words: found.append(words[1]))
    assert found == refused
