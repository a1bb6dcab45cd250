"""4-bit weights in slots: views of a slot, bitsandbytes' Params4bit over them, and the arena's side for state_dict."""

from __future__ import annotations

import dataclasses

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState

from ..errors import StaleWeightError
from ..quant_state import weight_args
from .native import Arena
from .store import CheckpointStore, StoredWeight


class StreamedQuantState(QuantState):
    """A QuantState whose scales can be read only while its layer is being visited.

    The multiply does not come by here. Whoever else reads the scales (merge, DoRA's start values, a dequantise by
    hand) would get whatever layer the slot holds at the time, so outside of a visit absmax raises StaleWeightError.
    """

    visit = None
    name = ""

    @property
    def absmax(self):
        if self.visit is not None and not self.visit.active:
            raise StaleWeightError(
                f"weight {self.name} was read outside of its layer's forward, where its slot may hold another layer. "
                "Merging, unmerging, DoRA start values and dequantising by hand need resident weights: call "
                "nybble.unstream(model) first, or work on a resident copy of the model"
            )
        return self._absmax

    @absmax.setter
    def absmax(self, value):
        self._absmax = value


def _typed(part: torch.Tensor, name: str, nested: bool) -> torch.Tensor:
    """A part's bytes (uint8) with the dtype and shape of the field that they are."""
    if name == "packed":
        return part.view(-1, 1)
    if name == "absmax" and nested:
        return part
    field = part.view(torch.float32)
    return field.view(()) if name == "offset" else field


def _quant_state(cls, weight: StoredWeight, fields: dict[str, torch.Tensor], tables: Tables):
    state2 = None
    if weight.nested:
        state2 = QuantState(
            absmax=fields["nested_absmax"], blocksize=256, code=tables.nested_code, dtype=weight.nested_dtype
        )
    return cls(
        absmax=fields["absmax"],
        shape=torch.Size(weight.shape),
        code=tables.code[weight.quant_type],
        blocksize=weight.blocksize,
        quant_type=weight.quant_type,
        dtype=weight.dtype,
        offset=fields.get("offset"),
        state2=state2,
    )


def params_4bit(weight: StoredWeight, packed: torch.Tensor, state: QuantState, module) -> bnb.nn.Params4bit:
    return bnb.nn.Params4bit(
        packed,
        requires_grad=False,
        quant_state=state,
        blocksize=weight.blocksize,
        compress_statistics=weight.nested,
        quant_type=weight.quant_type,
        quant_storage=torch.uint8,
        module=module,
        bnb_quantized=True,
    )


@dataclasses.dataclass
class Tables:
    """Code tables on the device: one tensor each, shared by every layer and never refilled."""

    code: dict[str, torch.Tensor]
    nested_code: torch.Tensor


class StreamedWeight:
    """One projection's weight: its uid, its parameter over the slot, and the arguments of the multiply, all made once.

    visit: the layer's. arena_layer, first_part: where the bytes live in the arena.
    """

    def __init__(self, stored: StoredWeight, uid: int, visit, arena: Arena, arena_layer: int, first_part: int):
        self.stored = stored
        self.name = stored.name
        self.uid = torch.tensor(uid, dtype=torch.int64)
        self.visit = visit
        self._arena = arena
        self._where = (arena_layer, first_part)
        self._resident: dict[str, torch.Tensor] | None = None

    def require_bytes(self, slot: torch.Tensor, offsets: dict[str, int]) -> None:
        """StaleWeightError unless the slot holds the arena's bytes. Waits for the device."""
        layer, part = self._where
        for index, (name, size) in enumerate(self.stored.parts().items()):
            found = slot[offsets[name] : offsets[name] + size].cpu()
            wrong = (found != self._arena.part(layer, part + index)).nonzero()
            if len(wrong):
                raise StaleWeightError(
                    f"{self.name}: {len(wrong)} of {size} bytes of {name} in its slot are not those of the host arena, "
                    f"the first at {wrong[0].item()}; something wrote to the slot, through .data or a raw pointer"
                )

    def bind(self, module, slot: torch.Tensor, offsets: dict[str, int], tables: Tables) -> None:
        """Makes the parameter over the slot's bytes that `module` will own, and the multiply's arguments."""
        fields = {
            name: _typed(slot[offsets[name] : offsets[name] + size], name, self.stored.nested)
            for name, size in self.stored.parts().items()
        }
        state = _quant_state(StreamedQuantState, self.stored, fields, tables)
        args = weight_args(fields["packed"], state)
        self.tensors = args.tensors
        self.spec = (*args.shape, args.blocksize, args.quant_type, args.state_dtype, args.nested_dtype, 0, False)
        state.name, state.visit = self.name, self.visit
        self.parameter = params_4bit(self.stored, fields["packed"], state, module)

    def fill(self, store: CheckpointStore) -> None:
        """Copies the weight from the store into the arena. ValueError when its scales are not finite."""
        layer, part = self._where
        names = self.stored.tensor_names()
        for index, name in enumerate(self.stored.parts()):
            if name in names:
                self._arena.fill_tensor(layer, part + index, store.mapped, names[name])
            else:
                self._arena.fill(layer, part + index, torch.tensor(self.stored.offset))
        store.require_finite_scales(self.stored, self._fields())  # views for this moment: pin() may move the bytes

    def _fields(self) -> dict[str, torch.Tensor]:
        layer, part = self._where
        return {
            name: _typed(self._arena.part(layer, part + index), name, self.stored.nested)
            for index, name in enumerate(self.stored.parts())
        }

    def resident_fields(self) -> dict[str, torch.Tensor]:
        """The arena's bytes as typed tensors, each with a storage of its own (savers that drop shared tensors keep
        them all). No copy.
        """
        if self._resident is None:
            self._resident = self._fields()
        return self._resident

    def state_dict_entries(self) -> dict[str, torch.Tensor]:
        """What a resident Linear4bit would write, by suffix of "<prefix>weight", in its order."""
        fields = self.resident_fields()
        entries = {"": fields["packed"], ".absmax": fields["absmax"], ".quant_map": self.stored.code.clone()}
        if self.stored.nested:
            entries[".nested_absmax"] = fields["nested_absmax"]
            entries[".nested_quant_map"] = self.stored.nested_code.clone()
        entries[f".quant_state.bitsandbytes__{self.stored.quant_type}"] = self.stored.state
        return entries

    def resident_parameter(self, module, device: torch.device, tables: Tables) -> bnb.nn.Params4bit:
        """A parameter with its own bytes on the device, as from_pretrained would make it."""
        fields = {name: tensor.to(device, copy=True) for name, tensor in self.resident_fields().items()}
        own = Tables({kind: code.clone() for kind, code in tables.code.items()}, tables.nested_code.clone())
        state = _quant_state(QuantState, self.stored, fields, own)
        return params_4bit(self.stored, fields["packed"], state, module)
