"""The class that a patched Linear4bit becomes: same module, same name, same parameters, other multiply."""

from __future__ import annotations

import copy
import copyreg
import functools
import types
from typing import Any

import bitsandbytes as bnb
import torch

from ..linear import linear

UPSTREAM_FORWARD = bnb.nn.Linear4bit.forward
# Where accelerate's hooks, or their removal, keep a bound method of the class on the instance.
_BOUND_COPIES = ("forward", "_old_forward")


def quant_state_of(module: torch.nn.Module) -> Any:
    """The state that belongs to a module's weight. FSDP rebuilds parameters without it, so the module keeps one too."""
    state = getattr(module.weight, "quant_state", None)
    return state if state is not None else getattr(module, "quant_state", None)


def operands(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What Linear4bit.forward multiplies with: x and its bias in the compute dtype. The bias is cast for the call only,
    where upstream casts the parameter itself.
    """
    if not self.compute_type_is_set:
        self.set_compute_type(x)
        self.compute_type_is_set = True
    dtype = self.compute_dtype
    if dtype not in (None, x.dtype):
        x = x.to(dtype)
    if bias is not None:
        bias = bias.to(x.dtype)
    # Upstream's multiply is torch's own at training sizes, so autocast recasts x and bias there.
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device))
        bias = bias if bias is None else bias.to(x.dtype)
    return x, bias


def multiply(self, x: torch.Tensor, mode: str) -> torch.Tensor:
    """Linear4bit.forward, line for line in values, with nybble's multiply. No weight is repacked for CPU inference."""
    inp_dtype = x.dtype
    x, bias = operands(self, x, self.bias)
    return linear(x, self.weight, quant_state_of(self), bias, mode=mode).to(inp_dtype)


class Patched:
    """What patched classes have in common. nybble_mode: the mode of every multiply."""

    nybble_mode: str

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return multiply(self, x, self.nybble_mode)

    def __deepcopy__(self, memo):
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__dict__, memo))
        return twin

    def __reduce_ex__(self, protocol):
        """Pickled as the class it was: a file written from a patched model is that of an unpatched one."""
        return copyreg._reconstructor, (unpatched_class(type(self)), object, None), vars(self).copy()


@functools.cache
def patched_class(base: type, mode: str) -> type:
    """The subclass of a bitsandbytes class that multiplies with nybble. Its name stays: PEFT and accelerate look at
    it.
    """
    body = {
        "nybble_mode": mode,
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
    }
    return type(base.__name__, (Patched, base), body)


def unpatched_class(cls: type) -> type:
    return cls.__bases__[1] if issubclass(cls, Patched) else cls


def foreign_forward(module: torch.nn.Module) -> str | None:
    """Who replaced this module's forward, or None where calling the module ends in the class's own."""
    base = unpatched_class(type(module))
    if base.forward is not UPSTREAM_FORWARD:
        return f"class {base.__name__} has a forward of its own"
    for name in ("_old_forward",) if "_old_forward" in vars(module) else ("forward",):
        set_here = vars(module).get(name)
        if set_here is not None and _class_of_bound(module, set_here) is None:
            return f"something set {name} on this module ({getattr(set_here, '__module__', type(set_here).__name__)})"
    return None


def _class_of_bound(module, method) -> type | None:
    if isinstance(method, types.MethodType) and method.__self__ is module:
        return next((cls for cls in type(module).__mro__ if vars(cls).get("forward") is method.__func__), None)
    return None


def set_class(module: torch.nn.Module, cls: type) -> None:
    """Changes a module's class, and the bound methods of the old one that hooks keep on the instance."""
    bound = [name for name in _BOUND_COPIES if _class_of_bound(module, vars(module).get(name)) is not None]
    module.__class__ = cls
    for name in bound:
        vars(module)[name] = types.MethodType(cls.forward, module)
