"""Stores that are damaged, and good twins: fault -> (what makes it, the tensor, what is found, what is expected)."""

import json
import pathlib
import shutil

import torch
from safetensors.torch import load_file, save_file

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
    "code of integers": (
        part(".quant_map", lambda t: t.int()),
        f"{KEY}.quant_map",
        "I32 [16]",
        "F32, BF16 or F16 [16]",
    ),
    "no code": (without(f"{KEY}.quant_map"), f"{KEY}.quant_map", "no such tensor", "F32, BF16 or F16 [16]"),
    "nested code rounded": (
        part(".nested_quant_map", lambda t: t.bfloat16()),
        f"{KEY}.nested_quant_map",
        "entry 0 = -0.9921875",
        "-0.992968738, as in every nested table",
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


def rounded(tensors):
    """A code table as some loaders saved it: the multiply has its own."""
    tensors[f"{KEY}.quant_map"] = tensors[f"{KEY}.quant_map"].bfloat16()


GOOD = {"nested": lambda tensors: None, "plain": plain, "code rounded": rounded}
