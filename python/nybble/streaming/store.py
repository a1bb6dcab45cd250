"""The on-disk store as streaming reads it: a Hugging Face checkpoint that bitsandbytes' rules quantised."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import re
from typing import NoReturn

import torch
from safetensors import safe_open
from transformers import BitsAndBytesConfig

from ..quant_state import QUANT_TYPE_CODES, nested_table, table
from .native import Checkpoint
from .stored_state import DTYPES, NESTED_BLOCKSIZE, read_state, require_finite_scales, require_table

_SINGLE = "model.safetensors"
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_STATE = re.compile(r"\.quant_state\.bitsandbytes__(\w+)$")
_PACKED_BYTES = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4}  # dtypes that carry packed codes, per element
_TABLES = ("F32", "BF16", "F16")


@dataclasses.dataclass
class StoredWeight:
    """One 4-bit weight of a store, without the bytes that stream."""

    name: str  # of the module, without ".weight"
    shape: tuple[int, int]  # [out_features, in_features]
    blocksize: int
    quant_type: str
    dtype: torch.dtype  # of the dense weight
    nested_dtype: torch.dtype | None  # None: plain scales
    offset: float
    state: torch.Tensor  # uint8, the JSON that bitsandbytes stores, kept for state_dict
    code: torch.Tensor  # float32 [16]
    nested_code: torch.Tensor | None  # float32 [256]

    @property
    def nested(self) -> bool:
        return self.nested_dtype is not None

    @property
    def blocks(self) -> int:
        return -(-self.shape[0] * self.shape[1] // self.blocksize)

    @property
    def nested_blocks(self) -> int:
        return -(-self.blocks // NESTED_BLOCKSIZE)

    def parts(self) -> dict[str, int]:
        """Bytes of what streams, by part."""
        packed = (self.shape[0] * self.shape[1] + 1) // 2
        if not self.nested:
            return {"packed": packed, "absmax": 4 * self.blocks}
        return {"packed": packed, "absmax": self.blocks, "nested_absmax": 4 * self.nested_blocks, "offset": 4}

    def tensor_names(self) -> dict[str, str]:
        """The store's tensor behind each part; the offset is in the JSON."""
        names = {"packed": f"{self.name}.weight", "absmax": f"{self.name}.weight.absmax"}
        if self.nested:
            names["nested_absmax"] = f"{self.name}.weight.nested_absmax"
        return names


class CheckpointStore:
    """A folder with config.json and model.safetensors, or shards and model.safetensors.index.json.

    Raises FileNotFoundError or ValueError that says what was found, what was expected and what to do.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)
        config = self.path / "config.json"
        if not config.is_file():
            raise FileNotFoundError(
                f"{self.path} has no config.json, expected a quantised checkpoint as `nybble quantize` writes it"
            )
        self.config = _json_object(config)
        self._files: dict[str, object] = {}
        where = self._index()
        self.mapped = Checkpoint(self.path)  # refuses a damaged file by its name
        if where is None:
            with safe_open(self.path / _SINGLE, framework="pt") as file:
                where = dict.fromkeys(file.keys(), _SINGLE)
        self._where = where

    def _index(self) -> dict[str, str] | None:
        """The file of each tensor; None: one file has all."""
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            where = _json_object(index).get("weight_map")
            if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
                raise ValueError(f"{index} has no weight_map of file names; copy the whole store again")
            missing = sorted({name for name in where.values() if not (self.path / name).is_file()})
            if missing:
                raise ValueError(f"{index} names {', '.join(missing)}, which is missing; copy the whole store")
            return where
        if not (self.path / _SINGLE).is_file():
            raise FileNotFoundError(f"{self.path} has neither {_SINGLE} nor {index.name}, expected one of them")
        return None

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> list[str]:
        return list(self._where)

    def _open(self, name: str):
        """The file that holds a tensor."""
        file_name = self._where.get(name)
        if file_name is None:
            raise ValueError(f"the store {self.path} has no tensor {name}; is it a store of this model?")
        if file_name not in self._files:
            self._files[file_name] = safe_open(self.path / file_name, framework="pt")
        return self._files[file_name]

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the store, on the CPU."""
        return self._open(name).get_tensor(name)

    def kind(self, name: str) -> tuple[str, list[int]]:
        """A tensor's dtype as safetensors spells it ("U8", "F32", ...) and its shape. Reads no data."""
        found = self._open(name).get_slice(name)
        return found.get_dtype(), found.get_shape()

    def close(self) -> None:
        self._files.clear()
        self.mapped.close()

    def quantization_config(self) -> BitsAndBytesConfig:
        """What the store's config.json says of its 4-bit weights. ValueError names the field that is wrong."""
        where, found = self.path / "config.json", self.config.get("quantization_config")

        def refuse(field: str, value, expected: str) -> NoReturn:
            raise ValueError(
                f"{where}: found quantization_config.{field} {value!r}, expected {expected}; make a store with "
                f"`nybble quantize`. `nybble verify {self.path}` lists every fault"
            )

        if not isinstance(found, dict) or found.get("quant_method") != "bitsandbytes":
            raise ValueError(
                f"{where} has quantization_config {found}, expected quant_method bitsandbytes; "
                "make a store with `nybble quantize`"
            )
        if found.get("load_in_4bit") is not True:
            refuse("load_in_4bit", found.get("load_in_4bit"), "True")
        compute = found.get("bnb_4bit_compute_dtype", "float32")
        if not isinstance(compute, str) or compute not in DTYPES:
            refuse("bnb_4bit_compute_dtype", compute, f"one of {', '.join(DTYPES)}")
        kinds = sorted({match[1] for match in map(_STATE.search, self._where) if match})
        kind = found.get("bnb_4bit_quant_type")
        if len(kinds) == 1 and kind != kinds[0]:
            refuse("bnb_4bit_quant_type", kind, f"{kinds[0]!r}, as in every weight's state")
        try:
            return BitsAndBytesConfig(**{name: value for name, value in found.items() if name != "quant_method"})
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{where}: found a quantization_config that transformers refuses ({error}), expected what "
                f"`nybble quantize` writes; copy config.json again"
            ) from None

    def require_layers(self, count: int) -> None:
        """ValueError when the store has weights of more decoder layers than its config.json says."""
        last = max((int(found[1]) for found in map(_LAYER.search, self._where) if found), default=-1)
        if last >= count:
            raise ValueError(
                f"{self.path / 'config.json'}: found num_hidden_layers {count}, expected {last + 1} as the store has "
                "weights of; copy config.json again, or pass a config of your own to use the first layers only"
            )

    def is_quantised(self, module: str) -> bool:
        return any(f"{module}.weight.quant_state.bitsandbytes__{kind}" in self for kind in QUANT_TYPE_CODES)

    def require_dense(self, module: str) -> None:
        """ValueError when the store has parts of a 4-bit weight for a module, but no quant state."""
        name = f"{module}.weight"
        if f"{name}.absmax" in self or (name in self and self.kind(name)[0] == "U8"):
            self.refuse(name, "no quant state", f"the tensor {name}.quant_state.bitsandbytes__nf4 or ...__fp4")

    def weight(self, module: str) -> StoredWeight:
        """The 4-bit weight of a module, every field and size checked; the scales' values are checked when they are in
        the arena. ValueError names the tensor and the field.
        """
        kinds = [kind for kind in QUANT_TYPE_CODES if f"{module}.weight.quant_state.bitsandbytes__{kind}" in self]
        if len(kinds) != 1:
            self.refuse(f"{module}.weight", f"{len(kinds)} quant states", "one")
        key = f"{module}.weight.quant_state.bitsandbytes__{kinds[0]}"
        self._require_kind(key, "U8", None)
        state = self.tensor(key)
        fields = read_state(bytes(state.flatten().tolist()), kinds[0], key, self.refuse)
        nested = fields.nested_dtype is not None
        for part in ("nested_absmax", "nested_quant_map"):
            if not nested and f"{module}.weight.{part}" in self:
                found = f"{module}.weight.{part}"
                self.refuse(found, "a part of nested scales", "none, since the quant state has no nested fields")
        weight = StoredWeight(
            name=module,
            quant_type=kinds[0],
            state=state,
            code=self._table(f"{module}.weight.quant_map", kinds[0]),
            nested_code=self._table(f"{module}.weight.nested_quant_map", "nested") if nested else None,
            **fields._asdict(),
        )
        self._require_sizes(weight)
        return weight

    def refuse(self, tensor: str, found: str, expected: str) -> NoReturn:
        raise ValueError(
            f"{tensor}: found {found}, expected {expected}; quantise the original again with `nybble quantize`, or "
            f"copy the store again. `nybble verify {self.path}` lists every fault"
        )

    def require_finite_scales(self, weight: StoredWeight, fields: dict[str, torch.Tensor]) -> None:
        require_finite_scales(weight, fields, self.refuse)

    def _require_kind(self, tensor: str, dtype: str, size: int | None) -> None:
        """size: elements, None for any number of them."""
        if tensor not in self:
            self.refuse(tensor, "no such tensor", f"{dtype} [{size}]")
        found, shape = self.kind(tensor)
        if found != dtype or size not in (None, math.prod(shape)):
            self.refuse(tensor, f"{found} {shape}", f"{dtype} [{'bytes of JSON' if size is None else size}]")

    def _table(self, key: str, which: str) -> torch.Tensor:
        cpu = torch.device("cpu")
        expected = nested_table(cpu) if which == "nested" else table(which, cpu)
        if key not in self or self.kind(key)[0] not in _TABLES:
            self._require_kind(key, "F32, BF16 or F16", expected.numel())
        self._require_kind(key, self.kind(key)[0], expected.numel())
        found = self.tensor(key)
        require_table(key, found, expected, which, self.refuse)
        return found

    def _require_sizes(self, weight: StoredWeight) -> None:
        names = weight.tensor_names()
        if names["packed"] not in self:
            self.refuse(names["packed"], "no such tensor", "the packed codes of the quant state beside it")
        dtype, shape = self.kind(names["packed"])
        if dtype not in _PACKED_BYTES:
            self.refuse(names["packed"], f"{dtype} {shape}", "packed codes as U8, BF16, F16 or F32")
        found, expected = _PACKED_BYTES[dtype] * math.prod(shape), weight.parts()["packed"]
        if found != expected:
            weights = weight.shape[0] * weight.shape[1]
            self.refuse(names["packed"], f"{dtype} {shape}, {found} bytes", f"{expected} bytes for {weights} weights")
        self._require_kind(names["absmax"], "U8" if weight.nested else "F32", weight.blocks)
        if weight.nested:
            self._require_kind(names["nested_absmax"], "F32", weight.nested_blocks)


def _json_object(path: pathlib.Path) -> dict:
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError):  # of the text's encoding too
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object, expected one; copy the whole store again")
    return found
