"""The classes that streamed modules become: same modules, same names, other forward. Methods only, no closures."""

from __future__ import annotations

import functools

import bitsandbytes as bnb
import torch
from torch.autograd.graph import saved_tensors_hooks

from ..errors import StaleWeightError
from ..linear import multiply
from ..patching.modules import operands

_REMEDY = "call nybble.unstream(model) first: it puts every weight back on the device"


def _refuse_copy(self, *_):
    raise TypeError(
        f"a streamed {type(self).__name__} can't be copied or pickled, as its weights live in slots that other layers "
        f"use too; save adapters with save_pretrained or state_dict(), or {_REMEDY}"
    )


@functools.cache
def layer_class(base: type) -> type:
    """A subclass of a decoder layer's class whose forward fetches the layer first. Its name stays, as transformers
    and accelerate look layers up by name.

    The class's own forward is the one place that runs in every recomputation: since transformers 5.23 checkpointing
    re-runs neither module hooks nor a forward set on the instance.
    """

    def forward(self, *args, **kwargs):
        visit = self._nybble_visit
        backward = True
        try:
            backward = visit.enter(self, args[0] if args else kwargs.get("hidden_states"))
            return base.forward(self, *args, **kwargs)
        finally:
            visit.leave(backward)

    def checkpoints(self):
        """Read by transformers' checkpointing before it wraps the forward: a layer that keeps isn't recomputed."""
        return self.__dict__.get("gradient_checkpointing", False) and not self._nybble_visit.keep

    def set_checkpointing(self, on):
        self.__dict__["gradient_checkpointing"] = on

    body = {
        "forward": functools.wraps(base.forward)(forward),
        "gradient_checkpointing": property(checkpoints, set_checkpointing),
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__deepcopy__": _refuse_copy,
        "__reduce_ex__": _refuse_copy,
    }
    return type(base.__name__, (base,), body)


class StreamedLinear4bit(bnb.nn.Linear4bit):
    """bitsandbytes' Linear4bit (PEFT picks its LoRA class by it) whose multiply is nybble's, with the owner check."""

    nybble_streamed = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, own = self._nybble_weight, self._parameters  # what torch's __getattr__ would find, several us later
        if own["weight"] is not weight.parameter:
            raise StaleWeightError(
                f"weight {weight.name} left the ring: the module has another parameter than the one in the slot "
                f"(something assigned or merged it); {_REMEDY} before changing base weights"
            )
        inp_dtype = x.dtype
        x, bias = operands(self, x, own["bias"])
        if weight.visit.scoped:
            with saved_tensors_hooks(weight.visit.pack, weight.visit.unpack):
                y = multiply(x, weight.tensors, bias, weight.uid, weight.spec, None)
        else:
            y = multiply(x, weight.tensors, bias, weight.uid, weight.spec, None)
        return y if y.dtype == inp_dtype else y.to(inp_dtype)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        weight = self._nybble_weight
        entries = weight.state_dict_entries()
        destination[prefix + "weight"] = entries.pop("")
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()
        for suffix, tensor in entries.items():
            destination[prefix + "weight" + suffix] = tensor

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        given = [key for key in state_dict if key == prefix + "weight" or key.startswith(prefix + "weight.")]
        if given:
            errors.append(
                f"{self._nybble_weight.name} is streamed from its store, but the state dict brings {len(given)} "
                f"tensors for it ({given[0]}, ...); load adapters only, stream another store, or {_REMEDY}"
            )
            return
        if strict:
            missing.append(prefix + "weight")
        with _without_weight(self):
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    def _apply(self, fn, recurse=True):
        with _without_weight(self):  # slots stay where they are: .to(), .half() and .cuda() move the rest
            return super()._apply(fn, recurse)

    __deepcopy__ = _refuse_copy
    __reduce_ex__ = _refuse_copy


StreamedLinear4bit.__name__ = StreamedLinear4bit.__qualname__ = "Linear4bit"


class _without_weight:
    """Hides the streamed parameter from code that walks a module's parameters."""

    def __init__(self, module):
        self._module = module

    def __enter__(self):
        self._weight = self._module._parameters["weight"]
        self._module._parameters["weight"] = None

    def __exit__(self, *_):
        self._module._parameters["weight"] = self._weight


def stream_linear(module: torch.nn.Linear, weight, compute_dtype: torch.dtype) -> None:
    """Turns a torch Linear or bitsandbytes Linear4bit into a streamed one, in place. Other modules that hold it (a
    PEFT layer) notice nothing.
    """
    if not isinstance(module, bnb.nn.Linear4bit):
        module.compute_dtype = compute_dtype
        module.compute_type_is_set = True
        module.quant_storage = torch.uint8
        module.support_avx512bf16_for_cpu = False
    module.__dict__.pop("forward", None)
    module._nybble_weight = weight
    module._parameters["weight"] = weight.parameter
    module.quant_state = weight.parameter.quant_state
    module.__class__ = StreamedLinear4bit


def stream_layer(layer: torch.nn.Module, visit) -> None:
    layer._nybble_visit = visit
    layer.__class__ = layer_class(type(layer))


def resident_linear(module: StreamedLinear4bit, parameter: bnb.nn.Params4bit) -> None:
    """Undoes stream_linear: a plain Linear4bit with its own parameter."""
    module.__class__ = bnb.nn.Linear4bit
    module._parameters["weight"] = parameter
    module.quant_state = parameter.quant_state
    del module._nybble_weight


def resident_layer(layer: torch.nn.Module) -> None:
    layer.__class__ = type(layer).__mro__[1]
    del layer._nybble_visit
