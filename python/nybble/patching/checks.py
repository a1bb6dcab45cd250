"""What patch() must know of a module before it changes anything."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from ..devices import device_note
from ..errors import UnsupportedError
from ..plan import supports
from ..quant_state import weight_args
from .modules import quant_state_of
from .report import ModuleReport, reason_in_words

_REPORT_ROWS = 512


def check_weight(name: str, module: torch.nn.Module) -> None:
    """ValueError or NotImplementedError, with the module's name, where its weight cannot be multiplied with."""
    weight, state = module.weight, quant_state_of(module)
    if weight.is_meta:
        raise ValueError(
            f"{name}: the weight is on the meta device, expected a quantised weight; load the model (from_pretrained "
            "with a BitsAndBytesConfig) before nybble.patch"
        )
    try:
        device_note(weight.device)
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {error}") from None
    if state is None:
        if weight.is_floating_point() and weight.shape == (module.out_features, module.in_features):
            raise ValueError(
                f"{name}: the weight is still dense ({weight.dtype}), expected a quantised one; bitsandbytes "
                "quantises when the module moves to a device, e.g. model.to(device)"
            )
        raise ValueError(
            f"{name}: the weight has no quant_state (neither on the parameter nor on the module), so its scales are "
            "lost; load the model again, and keep Params4bit when you replace parameters"
        )
    if getattr(state, "packing_format_for_cpu", False):
        raise ValueError(
            f"{name}: the weight is in bitsandbytes' CPU inference layout (it ran in eval mode), expected the usual "
            "one; load the model again and patch it before its first forward (model.state_dict() puts the layout back, "
            "but with rounded scales)"
        )
    try:
        args = weight_args(weight, state)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    if args.shape != (module.out_features, module.in_features):
        raise ValueError(
            f"{name}: quant_state.shape is {list(args.shape)}, expected "
            f"{[module.out_features, module.in_features]} ([out_features, in_features])"
        )
    absmax = args.tensors[1]
    if absmax.dtype != (torch.float32 if state.state2 is None else torch.uint8):
        raise ValueError(
            f"{name}: quant_state.absmax is {absmax.dtype}, expected torch.float32, or torch.uint8 with nested scales; "
            "load the model again (bitsandbytes leaves bfloat16 when it undoes its CPU inference layout)"
        )
    needed = (args.shape[0] * args.shape[1] + 1) // 2
    if weight.numel() * weight.element_size() != needed:
        raise ValueError(
            f"{name}: the packed weight has {weight.numel() * weight.element_size()} bytes, expected {needed} for "
            f"shape {list(args.shape)}; patch before sharding (FSDP), or load the model again"
        )
    names = ("weight", "absmax", "code", "state2.absmax", "state2.code", "offset")
    for part, tensor in zip(names, args.tensors, strict=True):
        if tensor is not None and tensor.device != weight.device:
            raise ValueError(
                f"{name}: quant_state.{part} is on {tensor.device}, the weight on {weight.device}; move the whole "
                "module with .to(device), which moves both"
            )


def describe(name: str, module: torch.nn.Module, mode: str) -> ModuleReport:
    """The path that this module will take in training, and why."""
    state = quant_state_of(module)
    shape = tuple(state.shape)
    dtype = module.compute_dtype if module.compute_type_is_set else None
    if mode == "dequant":
        return ModuleReport(name, "dequant", 'mode="dequant" was asked for', shape, dtype)
    x = torch.empty(1, shape[1], dtype=dtype or torch.bfloat16, device=module.weight.device)
    weight = module.weight
    if isinstance(weight, DTensor):  # sharded by FSDP2: gathered before the forward, so the plan is that of the whole
        weight = torch.empty(weight.numel() * weight.element_size(), dtype=torch.uint8, device=weight.device)
    against = supports(x.expand(_REPORT_ROWS, -1), weight, state)
    if against is None:
        return ModuleReport(name, "fused", None, shape, dtype)
    return ModuleReport(name, "dequant", reason_in_words(against, dtype), shape, dtype)
