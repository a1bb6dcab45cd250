"""The packed base of a stack: per layer one blob of bytes in host memory, and the views that a slot of that layout has.

    blob   | q: packed | absmax | nested_absmax | offset | pad to 256 | k: packed | ... | norm | ...

Code tables are shared by every weight and stay resident, as they do in a real base.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import nybble

ALIGNMENT = 256
BLOCK = 64


@dataclass(frozen=True)
class Part:
    """One tensor of a layer's blob."""

    offset: int  # bytes from the blob's start
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Weight4Bit:
    """One NF4 weight [N, K], nested: views of whatever buffer they were cut from."""

    packed: torch.Tensor  # uint8 [(N*K+1)//2, 1]
    absmax: torch.Tensor  # uint8 [ceil(N*K/64)]
    nested_absmax: torch.Tensor  # fp32 [ceil(blocks/256)]
    offset: torch.Tensor  # fp32 []
    code: torch.Tensor  # fp32 [16], resident
    nested_code: torch.Tensor  # fp32 [256], resident
    shape: tuple[int, int]  # (N, K)
    dtype: torch.dtype
    uid: torch.Tensor | None = None  # int64 [] on the CPU: asks the op to check the owner


FIELDS = ("packed", "absmax", "nested_absmax", "offset")
VECTOR = "vector"


class Base:
    """`layers` layers of the same named weights, quantised (or kept dense), one blob per layer.

    Args:
        shapes: (N, K) by name.
        layers: number of layers.
        dense: True keeps dtype weights instead of NF4 (for the native arm).
        device: where the slots will be and weights are drawn; blobs are host memory, page-locked for CUDA.
        seed: of the weights, N(0, 1/K).
        vectors: sizes by name of what else a layer streams, in dtype: norms, which reach torch's own ops.
    """

    def __init__(
        self,
        shapes: dict[str, tuple[int, int]],
        layers: int,
        *,
        dense: bool,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        vectors: dict[str, int] | None = None,
    ):
        self.shapes, self.layers, self.dense, self.device, self.dtype = dict(shapes), layers, dense, device, dtype
        self.vectors = dict(vectors or {})
        self.parts: dict[tuple[str, str], Part] = {}
        self.blob_bytes = 0
        self.code = self.nested_code = None
        self.blobs: list[torch.Tensor] = []
        generator = torch.Generator(device).manual_seed(seed)
        for _ in range(layers):
            tensors = {}
            for name, (n, k) in self.shapes.items():
                weight = (torch.randn(n, k, generator=generator, device=device) / k**0.5).to(dtype)
                tensors.update(self._tensors_of(name, weight))
            for name, size in self.vectors.items():
                tensors[name, VECTOR] = (1 + 0.2 * torch.randn(size, generator=generator, device=device)).to(dtype)
            if not self.parts:
                self._lay_out(tensors)
            self.blobs.append(self._blob(tensors))

    def _tensors_of(self, name: str, weight: torch.Tensor) -> dict[tuple[str, str], torch.Tensor]:
        if self.dense:
            return {(name, "weight"): weight}
        packed, state = nybble.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4", compress_statistics=True)
        if self.code is None:
            self.code, self.nested_code = state.code.to(self.device), state.state2.code.to(self.device)
        values = (packed, state.absmax, state.state2.absmax, state.offset.reshape(()))
        return {(name, field): value for field, value in zip(FIELDS, values, strict=True)}

    def _lay_out(self, tensors: dict[tuple[str, str], torch.Tensor]) -> None:
        end = 0
        for key, value in tensors.items():
            part = Part(-(-end // ALIGNMENT) * ALIGNMENT, tuple(value.shape), value.dtype)
            self.parts[key] = part
            end = part.offset + part.bytes
        self.blob_bytes = -(-end // ALIGNMENT) * ALIGNMENT

    def _blob(self, tensors: dict[tuple[str, str], torch.Tensor]) -> torch.Tensor:
        blob = torch.zeros(self.blob_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        for key, part in self.parts.items():
            blob[part.offset : part.offset + part.bytes] = tensors[key].contiguous().reshape(-1).view(torch.uint8)
        return blob

    def views(self, buffer: torch.Tensor) -> dict[str, Weight4Bit | torch.Tensor]:
        """The weights and vectors that `buffer` (uint8 [blob_bytes]) holds, by name, as views."""
        cut = {
            key: buffer[part.offset : part.offset + part.bytes].view(part.dtype).view(part.shape)
            for key, part in self.parts.items()
        }
        vectors = {name: cut[name, VECTOR] for name in self.vectors}
        if self.dense:
            return vectors | {name: cut[name, "weight"] for name in self.shapes}
        return vectors | {
            name: Weight4Bit(*(cut[name, field] for field in FIELDS), self.code, self.nested_code, shape, self.dtype)
            for name, shape in self.shapes.items()
        }
