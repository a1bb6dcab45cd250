"""Stores that are damaged: each is refused by name, and the model that was to stream is as it was."""

import dataclasses
import json
import pathlib
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import LAYERS, assert_equal, checkpointed, resident_model, step, with_adapters

import nybble
from nybble.streaming.store import CheckpointStore
from nybble.streaming.stored_state import require_finite_scales

LATE = {"poison": True, "land_at_wait": True}
MODULE = "model.layers.3.mlp.up_proj"
KEY = f"{MODULE}.weight"
STATE = f"{KEY}.quant_state.bitsandbytes__nf4"
REMEDY = "; quantise the original again with `nybble quantize`, or copy the store again. `nybble verify "


def damaged(store: str, folder: pathlib.Path, change) -> pathlib.Path:
    shutil.copytree(store, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def as_tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def state(**fields):
    """Other fields of the JSON; None: without it."""

    def change(tensors):
        found = json.loads(bytes(tensors[STATE].tolist())) | fields
        tensors[STATE] = as_tensor(json.dumps({name: value for name, value in found.items() if value is not None}))

    return change


def text(made: str):
    return lambda tensors: tensors.update({STATE: as_tensor(made)})


def part(suffix: str, make):
    """Another tensor in place of a part."""
    return lambda tensors: tensors.update({KEY + suffix: make(tensors[KEY + suffix].clone()).contiguous()})


def without(name: str):
    return lambda tensors: tensors.pop(name)


def second_state(tensors):
    tensors[STATE.replace("nf4", "fp4")] = tensors[STATE].clone()


def moved_to_fp4(tensors):
    tensors[STATE.replace("nf4", "fp4")] = tensors.pop(STATE)


def large_in_half(tensors):
    """Finite parts whose scales overflow the dtype that they are rounded to."""
    state(nested_dtype="float16")(tensors)
    tensors[f"{KEY}.nested_absmax"][0] = 70_000


def put(value: float, at: int = 0):
    def change(tensor):
        tensor[at] = value
        return tensor

    return change


SIZES = "a power of two from 32 to 4096"
DTYPES = '"float32" or "float16" or "bfloat16"'
# What is wrong, the tensor that is named, what the message says was found, what it says was expected.
FAULTS = {
    "blocksize 0": (state(blocksize=0), STATE, "blocksize: 0", SIZES),
    "blocksize 63": (state(blocksize=63), STATE, "blocksize: 63", SIZES),
    "blocksize -64": (state(blocksize=-64), STATE, "blocksize: -64", SIZES),
    "blocksize text": (state(blocksize="64"), STATE, 'blocksize: "64"', SIZES),
    "blocksize float": (state(blocksize=64.0), STATE, "blocksize: 64.0", SIZES),
    "blocksize true": (state(blocksize=True), STATE, "blocksize: true", SIZES),
    "blocksize of other scales": (state(blocksize=128), f"{KEY}.absmax", "U8 [160]", "U8 [80]"),
    "no blocksize": (state(blocksize=None), STATE, "blocksize: the field is missing", SIZES),
    "other quant type": (state(quant_type="fp4"), STATE, 'quant_type: "fp4"', '"nf4", the type that'),
    "unknown quant type": (state(quant_type=4), STATE, "quant_type: 4", '"nf4", the type that'),
    "state under fp4": (moved_to_fp4, STATE.replace("nf4", "fp4"), 'quant_type: "nf4"', '"fp4", the type that'),
    "dtype int8": (state(dtype="int8"), STATE, 'dtype: "int8"', DTYPES),
    "dtype list": (state(dtype=[]), STATE, "dtype: []", DTYPES),
    "no shape": (state(shape=None), STATE, "shape: the field is missing", "[out_features, in_features]"),
    "shape null": (text('{"quant_type": "nf4", "shape": null}'), STATE, "shape: null", "[out_features, in_features]"),
    "shape of text": (state(shape=["160", "64"]), STATE, 'shape: ["160", "64"]', "[out_features, in_features]"),
    "shape of floats": (state(shape=[160.0, 64]), STATE, "shape: [160.0, 64]", "[out_features, in_features]"),
    "shape of three": (state(shape=[160, 8, 8]), STATE, "shape: [160, 8, 8]", "[out_features, in_features]"),
    "shape negative": (state(shape=[-160, -64]), STATE, "shape: [-160, -64]", "[out_features, in_features]"),
    "nested blocksize": (state(nested_blocksize=128), STATE, "nested_blocksize: 128", "256"),
    "nested blocksize float": (state(nested_blocksize=256.0), STATE, "nested_blocksize: 256.0", "256"),
    "no nested blocksize": (state(nested_blocksize=None), STATE, "nested_blocksize: the field is missing", "256"),
    "nested dtype": (state(nested_dtype="float64"), STATE, 'nested_dtype: "float64"', DTYPES),
    "offset text": (state(nested_offset="x"), STATE, 'nested_offset: "x"', "a finite number"),
    "offset of digits": (state(nested_offset="0.1"), STATE, 'nested_offset: "0.1"', "a finite number"),
    "offset NaN": (state(nested_offset=float("nan")), STATE, "nested_offset: NaN", "a finite number"),
    "offset infinite": (state(nested_offset=-float("inf")), STATE, "nested_offset: -Infinity", "a finite number"),
    "offset beyond float": (state(nested_offset=1e300), STATE, "nested_offset: 1e+300", "a finite number"),
    "offset beyond all": (state(nested_offset=10**400), STATE, "nested_offset: 1000", "a finite number"),
    "offset true": (state(nested_offset=True), STATE, "nested_offset: true", "a finite number"),
    "state cut off": (
        part(STATE[len(KEY) :], lambda t: t[:-1]),
        STATE,
        "bytes that are not a JSON object",
        "the quant state as JSON",
    ),
    "state of bytes": (text("\xff"), STATE, "2 bytes that are not a JSON object", "the quant state as JSON"),
    "state a list": (text("[1]"), STATE, "3 bytes that are not a JSON object", "the quant state as JSON"),
    "state nested deep": (
        text("[" * 60000),
        STATE,
        "60000 bytes that are not a JSON object",
        "the quant state as JSON",
    ),
    "state huge": (text("[" * 70000), STATE, "70000 bytes that are not a JSON object", "the quant state as JSON"),
    "state of floats": (part(STATE[len(KEY) :], lambda t: t.float()), STATE, "F32 [", "U8 [bytes of JSON]"),
    "two states": (second_state, KEY, "2 quant states", "one"),
    "no state": (without(STATE), KEY, "no quant state", "the tensor"),
    "NaN in nested absmax": (
        part(".nested_absmax", put(float("nan"))),
        f"{KEY}.nested_absmax",
        "1 values that are NaN or Inf, the first at 0",
        "finite scales",
    ),
    "Inf in nested absmax": (
        part(".nested_absmax", put(-float("inf"))),
        f"{KEY}.nested_absmax",
        "1 values that are NaN or Inf, the first at 0",
        "finite scales",
    ),
    "scales overflow": (large_in_half, KEY, "the scale of block", "finite scales"),
    "short absmax": (part(".absmax", lambda t: t[:-1]), f"{KEY}.absmax", "U8 [159]", "U8 [160]"),
    "absmax of floats": (part(".absmax", lambda t: t[:40].float()), f"{KEY}.absmax", "F32 [40]", "U8 [160]"),
    "no absmax": (without(f"{KEY}.absmax"), f"{KEY}.absmax", "no such tensor", "U8 [160]"),
    "long nested absmax": (part(".nested_absmax", lambda t: t.repeat(2)), f"{KEY}.nested_absmax", "F32 [2]", "F32 [1]"),
    "no nested absmax": (without(f"{KEY}.nested_absmax"), f"{KEY}.nested_absmax", "no such tensor", "F32 [1]"),
    "long packed": (
        part("", lambda t: torch.zeros(5121, 1, dtype=torch.uint8)),
        KEY,
        "U8 [5121, 1], 5121 bytes",
        "5120 bytes for 10240 weights",
    ),
    "packed of integers": (
        part("", lambda t: t.view(-1, 4).view(torch.int32)),
        KEY,
        "I32 [",
        "packed codes as U8, BF16, F16 or F32",
    ),
    "no packed": (without(KEY), KEY, "no such tensor", "the packed codes of the quant state beside it"),
    "code of 15": (part(".quant_map", lambda t: t[:15]), f"{KEY}.quant_map", "F32 [15]", "F32 [16]"),
    "other code": (
        part(".quant_map", put(0.5, 3)),
        f"{KEY}.quant_map",
        "entry 3 = 0.5",
        "-0.394917488, as in every nf4 table",
    ),
    "NaN in the code": (
        part(".quant_map", put(float("nan"), 9)),
        f"{KEY}.quant_map",
        "entry 9 = nan",
        "0.160930201, as in every nf4 table",
    ),
    "other nested code": (
        part(".nested_quant_map", put(0.5, 255)),
        f"{KEY}.nested_quant_map",
        "entry 255 = 0.5",
        "1, as in every nested table",
    ),
}


def plain(tensors):
    """Plain scales from what they are nested in: the good twin of the faults below."""
    fields = json.loads(bytes(tensors[STATE].tolist()))
    codes, nested, code = (tensors.pop(KEY + s) for s in (".absmax", ".nested_absmax", ".nested_quant_map"))
    tensors[f"{KEY}.absmax"] = code[codes.long()] * nested[0] + fields["nested_offset"]
    tensors[STATE] = as_tensor(json.dumps({k: v for k, v in fields.items() if not k.startswith("nested")}))


PLAIN_FAULTS = {
    "NaN in absmax": (
        part(".absmax", put(float("nan"), 7)),
        f"{KEY}.absmax",
        "1 values that are NaN or Inf, the first at 7",
        "finite scales",
    ),
    "Inf in absmax": (
        part(".absmax", put(float("inf"), 159)),
        f"{KEY}.absmax",
        "1 values that are NaN or Inf, the first at 159",
        "finite scales",
    ),
    "half absmax": (part(".absmax", lambda t: t.half()), f"{KEY}.absmax", "F16 [160]", "F32 [160]"),
    "a nested part": (
        lambda t: t.update({f"{KEY}.nested_absmax": torch.ones(1)}),
        f"{KEY}.nested_absmax",
        "a part of nested scales",
        "none, since",
    ),
}


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
    "type of a number": ("bnb_4bit_quant_type", 4, "transformers refuses (bnb_4bit_quant_type must be a string)"),
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


@pytest.mark.parametrize("change", [lambda tensors: None, plain], ids=["nested", "plain"])
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
