"""What a plan needs of a model: its config and the headers of its files. No weights are read."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pathlib
import struct

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ..quant_state import QUANT_TYPE_CODES
from ..streaming import skeleton

PART_ALIGNMENT, LAYER_ALIGNMENT = 256, 4096  # of the host arena, see docs/streaming.md
BLOCK, NESTED_BLOCK = 64, 256  # what `nybble quantize` writes by default
_MAX_HEADER = 100 << 20
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def read_header(path: pathlib.Path) -> dict[str, dict]:
    """Name -> {"dtype", "shape", "data_offsets"} of a safetensors file. ValueError for a file that is not one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise ValueError(
                f"{path} is no safetensors file: its header would have {length} of the file's {size} bytes"
            )
        try:
            header = json.loads(file.read(length))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no safetensors file: its header is not JSON ({error})") from None
    header.pop("__metadata__", None)
    return header


def _headers(folder: pathlib.Path) -> dict[str, dict]:
    """The headers of all files of a checkpoint; empty for a folder with a config only."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{index} is damaged ({error!r}), expected a JSON object with a weight_map") from None
    else:
        files = ["model.safetensors"] if (folder / "model.safetensors").is_file() else []
    found = {}
    for name in files:
        if not (folder / name).is_file():
            raise ValueError(f"{index} names {name}, which is missing; copy the whole checkpoint")
        found |= read_header(folder / name)
    return found


def _bytes(entry: dict) -> int:
    begin, end = entry["data_offsets"]
    return end - begin


@dataclasses.dataclass
class ModelSource:
    """name: the folder. compute_dtype: of the multiplies. resident_dtype: of embedding, norms and head.
    layers: per decoder layer, {projection: (out_features, in_features)} of what streams.
    layer_bytes: of each layer's packed weights and scales, as the host arena lays them out.
    """

    name: str
    config: PretrainedConfig
    quantised: bool  # a store; else sizes are those that `nybble quantize` would give it
    compute_dtype: torch.dtype
    resident_dtype: torch.dtype
    layers: list[dict[str, tuple[int, int]]]
    layer_bytes: list[int]

    @property
    def eager_attention(self) -> bool:
        """No fused kernel caps the scores, so such a model holds them: memory grows with the square of a row."""
        return getattr(self.config, "attn_logit_softcapping", None) is not None

    @property
    def slot_bytes(self) -> int:
        return max(self.layer_bytes)

    @property
    def base_bytes(self) -> int:
        return sum(self.layer_bytes)

    @property
    def weights(self) -> int:
        return sum(n * k for layer in self.layers for n, k in layer.values())

    def first_layers(self, count: int) -> ModelSource:
        """The same with fewer layers, among them one of each type."""
        config = copy.deepcopy(self.config)
        config.num_hidden_layers = count
        types = getattr(config, "layer_types", None)
        if types:
            missing = sorted(set(types) - set(types[:count]))
            config.layer_types = types[: count - len(missing)] + missing
        return dataclasses.replace(
            self, config=config, layers=self.layers[:count], layer_bytes=self.layer_bytes[:count]
        )

    def build(self, attention: str) -> torch.nn.Module:
        """The model on meta, projections not replaced yet."""
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                self.config, attn_implementation=attention, dtype=self.resident_dtype
            )


def _part_sizes(header: dict[str, dict], weight: str, shape: tuple[int, int], stored: bool) -> list[int]:
    """Bytes of a projection's packed weight and scales, one by one."""
    if stored:
        parts = [weight, f"{weight}.absmax"]
        nested = f"{weight}.nested_absmax" in header
        missing = [name for name in parts if name not in header]
        if missing:
            raise ValueError(f"the store has no tensor {missing[0]}; `nybble verify` lists every fault")
        return [
            *[_bytes(header[name]) for name in parts],
            *([_bytes(header[f"{weight}.nested_absmax"]), 4] if nested else []),
        ]
    blocks = -(-shape[0] * shape[1] // BLOCK)
    return [(shape[0] * shape[1] + 1) // 2, blocks, 4 * -(-blocks // NESTED_BLOCK), 4]


def _config(folder: pathlib.Path) -> PretrainedConfig:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder} has no config.json, expected a store as `nybble quantize` writes it or a Hugging Face model"
        )
    try:
        config = AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError, TypeError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"{folder / 'config.json'} is not a config that transformers reads: {first}") from None
    skeleton.require_supported(config)
    return config


def read(model: str | os.PathLike) -> ModelSource:
    """MODEL: a store, or a folder with a model's config.json. FileNotFoundError or ValueError say what is wrong."""
    folder = pathlib.Path(model)
    config = _config(folder)
    header = _headers(folder)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        quantization = quantization if isinstance(quantization, dict) else quantization.to_dict()
        if quantization.get("quant_method") != "bitsandbytes":
            raise ValueError(
                f"{folder} is quantised by {quantization.get('quant_method')!r}, expected bitsandbytes or a dense model"
            )
        del config.quantization_config
    stored = quantization is not None and bool(header)
    embedding = next((entry for name, entry in header.items() if name.endswith("embed_tokens.weight")), None)
    resident = _DTYPES.get(embedding["dtype"]) if embedding else None
    resident = resident or getattr(config, "dtype", None) or torch.bfloat16
    compute = (quantization or {}).get("bnb_4bit_compute_dtype", resident)
    source = ModelSource(
        str(folder),
        config,
        stored,
        getattr(torch, compute) if isinstance(compute, str) else compute,
        resident,
        [],
        [],
    )
    _measure_layers(source, header)
    return source


def _measure_layers(source: ModelSource, header: dict[str, dict]) -> None:
    model = source.build("eager")
    decoder = model.base_model.layers
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    for index, layer in enumerate(decoder):
        shapes, total = {}, 0
        for path, module in layer.named_modules():
            weight = f"{prefix}.{index}.{path}.weight"
            stored = any(f"{weight}.quant_state.bitsandbytes__{kind}" in header for kind in QUANT_TYPE_CODES)
            if not isinstance(module, torch.nn.Linear) or (source.quantised and not stored):
                continue
            shapes[path] = (module.out_features, module.in_features)
            total += sum(_aligned(size, PART_ALIGNMENT) for size in _part_sizes(header, weight, shapes[path], stored))
        if not shapes:
            raise ValueError(
                f"layer {prefix}.{index} has no 4-bit weight in {source.name}; is it a store of this model?"
            )
        source.layers.append(shapes)
        source.layer_bytes.append(_aligned(total, LAYER_ALIGNMENT))
