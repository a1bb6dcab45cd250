"""The on-disk store as streaming reads it: a Hugging Face checkpoint that bitsandbytes' rules quantised."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib

import torch
from safetensors import safe_open

from ..quant_state import QUANT_TYPE_CODES, nested_table, table
from .native import Checkpoint

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


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

    def parts(self) -> dict[str, int]:
        """Bytes of what streams, by part."""
        packed = (self.shape[0] * self.shape[1] + 1) // 2
        if not self.nested:
            return {"packed": packed, "absmax": 4 * self.blocks}
        return {"packed": packed, "absmax": self.blocks, "nested_absmax": 4 * -(-self.blocks // 256), "offset": 4}

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
        self.config = json.loads(config.read_text())
        self._files: dict[str, object] = {}
        self._where = self._index()
        self.mapped = Checkpoint(self.path)

    def _index(self) -> dict[str, str]:
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            where = json.loads(index.read_text())["weight_map"]
            missing = sorted({name for name in where.values() if not (self.path / name).is_file()})
            if missing:
                raise ValueError(f"{index} names {', '.join(missing)}, which is missing; copy the whole store")
            return where
        single = "model.safetensors"
        if not (self.path / single).is_file():
            raise FileNotFoundError(f"{self.path} has neither {single} nor {index.name}, expected one of them")
        with safe_open(self.path / single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> list[str]:
        return list(self._where)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the store, on the CPU."""
        file_name = self._where.get(name)
        if file_name is None:
            raise ValueError(f"the store {self.path} has no tensor {name}; is it a store of this model?")
        if file_name not in self._files:
            self._files[file_name] = safe_open(self.path / file_name, framework="pt")
        return self._files[file_name].get_tensor(name)

    def close(self) -> None:
        self._files.clear()
        self.mapped.close()

    def quantization_config(self) -> dict:
        found = self.config.get("quantization_config")
        if not isinstance(found, dict) or found.get("quant_method") != "bitsandbytes":
            raise ValueError(
                f"{self.path / 'config.json'} has quantization_config {found}, expected quant_method bitsandbytes; "
                "make a store with `nybble quantize`"
            )
        return found

    def is_quantised(self, module: str) -> bool:
        return any(f"{module}.weight.quant_state.bitsandbytes__{kind}" in self for kind in QUANT_TYPE_CODES)

    def weight(self, module: str) -> StoredWeight:
        """The 4-bit weight of a module. The sizes of its tensors are checked when the arena takes them."""
        kinds = [kind for kind in QUANT_TYPE_CODES if f"{module}.weight.quant_state.bitsandbytes__{kind}" in self]
        if len(kinds) != 1:
            raise ValueError(f"{module}.weight has {len(kinds)} quant states in the store, expected one")
        state = self.tensor(f"{module}.weight.quant_state.bitsandbytes__{kinds[0]}")
        found = self._parse(module, kinds[0], state)
        self._check(found)
        return found

    def _parse(self, module: str, kind: str, state: torch.Tensor) -> StoredWeight:
        try:
            fields = json.loads(bytes(state.tolist()).decode())
            nested = f"{module}.weight.nested_absmax" in self
            return StoredWeight(
                name=module,
                shape=tuple(fields["shape"]),
                blocksize=fields["blocksize"],
                quant_type=kind,
                dtype=_DTYPES[fields["dtype"]],
                nested_dtype=_DTYPES[fields["nested_dtype"]] if nested else None,
                offset=float(fields["nested_offset"]) if nested else 0.0,
                state=state,
                code=self.tensor(f"{module}.weight.quant_map"),
                nested_code=self.tensor(f"{module}.weight.nested_quant_map") if nested else None,
            )
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"the quant state of {module}.weight is damaged ({type(error).__name__}: {error}); "
                f"expected bitsandbytes' JSON fields. `nybble verify {self.path}` lists every fault"
            ) from None

    def _check(self, weight: StoredWeight) -> None:
        def fail(what: str, found, expected) -> None:
            raise ValueError(
                f"{weight.name}.weight: {what} is {found}, expected {expected}. "
                f"`nybble verify {self.path}` lists every fault"
            )

        if len(weight.shape) != 2:
            fail("shape", list(weight.shape), "two dimensions")
        if not torch.equal(weight.code, table(weight.quant_type, torch.device("cpu"))):
            fail("quant_map", f"a table of {weight.code.numel()} other values", f"the 16 values of {weight.quant_type}")
        if weight.nested_code is not None and not torch.equal(weight.nested_code, nested_table(torch.device("cpu"))):
            fail(
                "nested_quant_map", f"a table of {weight.nested_code.numel()} other values", "bitsandbytes' 256 values"
            )
