"""A small quantised weight whose tensors can be cloned, poisoned and watched: what the contract's checks work on."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..quant_state import QuantState
from ..quantize import quantize_4bit

PARTS = ("packed", "absmax", "code", "nested_absmax", "nested_code", "offset")


class Weight:
    """A 4-bit weight [n, k] with its state, nested or plain scales. Each tensor has a storage of its own."""

    def __init__(self, packed: torch.Tensor, state: QuantState):
        self.packed = packed
        self.state = state

    @classmethod
    def random(cls, n: int, k: int, device, dtype: torch.dtype, nested: bool = True) -> Weight:
        generator = torch.Generator().manual_seed(7)
        dense = torch.randn(n, k, generator=generator).to(device, dtype)
        packed, state = quantize_4bit(dense, quant_type="nf4", compress_statistics=nested)
        return cls(packed, state).clone()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by name; nested_absmax, nested_code and offset only where scales are nested."""
        parts = {"packed": self.packed, "absmax": self.state.absmax, "code": self.state.code}
        if self.state.nested:
            parts.update(
                nested_absmax=self.state.state2.absmax, nested_code=self.state.state2.code, offset=self.state.offset
            )
        return parts

    def clone(self) -> Weight:
        """The same bytes in new storages."""
        old = self.state
        state2 = None
        if old.nested:
            inner = old.state2
            state2 = QuantState(
                inner.absmax.clone(), inner.shape, inner.code.clone(), inner.blocksize, inner.quant_type, inner.dtype
            )
        state = QuantState(
            absmax=old.absmax.clone(),
            shape=old.shape,
            code=old.code.clone(),
            blocksize=old.blocksize,
            quant_type=old.quant_type,
            dtype=old.dtype,
            offset=old.offset.clone() if old.nested else None,
            state2=state2,
        )
        return Weight(self.packed.clone(), state)

    def poison(self) -> None:
        """Overwrites all bytes the way a copy into a recycled buffer does: autograd's version counters do not
        move.
        """
        for tensor in self.tensors().values():
            spoil(tensor.data)

    def storages(self) -> dict[str, StorageWeakRef]:
        """Weak references that tell whether a storage has been freed."""
        return {name: StorageWeakRef(tensor.untyped_storage()) for name, tensor in self.tensors().items()}

    def addresses(self) -> dict[int, str]:
        return {tensor.untyped_storage().data_ptr(): name for name, tensor in self.tensors().items()}


def spoil(tensor: torch.Tensor) -> None:
    """Changes every element in place, to values that change any product."""
    if tensor.dtype == torch.uint8:
        tensor.bitwise_xor_(0xA5)
    else:
        tensor.mul_(-3).add_(1)
