"""patch and unpatch: every 4-bit module of a model, all checked before the first is changed."""

from __future__ import annotations

import threading
from collections import Counter

import bitsandbytes as bnb
import torch

from ..errors import UnsupportedError
from ..quant_state import mode_code
from .checks import check_weight, describe
from .modules import Patched, foreign_forward, patched_class, set_class, unpatched_class
from .report import ModuleReport, PatchReport

_lock = threading.Lock()


def patch(model: torch.nn.Module, *, mode: str = "auto") -> PatchReport:
    """Makes every bitsandbytes Linear4bit of a model multiply with nybble, in place; PEFT layers around it stay.

    Values follow Linear4bit.forward: compute dtype, bias, input dtype. Parameters, names, state_dict and saved files
    stay as they are. Call it before or after get_peft_model. Patching again changes nothing.

    mode: as for nybble.linear. "auto": the fused path where there is one; "fused": an error where there is none;
    "dequant": dequantize_4bit and torch's own multiply, for numbers equal to those of unpatched modules.

    Returns a report, one entry per 4-bit module: path and reason; print it. Streamed modules and modules whose
    forward someone replaced stay unpatched and are listed.

    Raises, before anything is changed: TypeError if model is no module; ValueError if there is nothing to patch, if
    the model is patched with another mode, if a weight is on meta, not quantised, without its state, split over
    devices or in the CPU inference layout; NotImplementedError for mode="fused" without a fused path and for
    devices other than CPUs and NVIDIA GPUs.
    """
    mode_code(mode)
    _check_model(model)
    with _lock:
        reports, todo = [], []
        for name, module in _linears(model):
            reason = _reason_to_skip(module)
            if reason is not None:
                reports.append(ModuleReport(name, "unpatched", reason, None, None))
                continue
            now = getattr(module, "nybble_mode", mode)
            if now != mode:
                raise ValueError(
                    f"{name}: patched with mode {now!r}, asked for {mode!r}; call nybble.unpatch(model) first"
                )
            check_weight(name, module)
            reports.append(describe(name, module, mode))
            if not isinstance(module, Patched):
                todo.append(module)
        _check_found(model, reports)
        if mode == "fused":
            _check_fused(reports)
        for module in todo:
            set_class(module, patched_class(type(module), mode))
    return PatchReport(mode, tuple(reports), len(todo))


def unpatch(model: torch.nn.Module) -> int:
    """Undoes patch(): every patched module is bitsandbytes' own again. Returns how many; 0 for a model without any."""
    _check_model(model)
    with _lock:
        patched = [module for module in model.modules() if isinstance(module, Patched)]
        for module in patched:
            set_class(module, unpatched_class(type(module)))
    return len(patched)


def _check_model(model) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module")


def _linears(model):
    return [(name, module) for name, module in model.named_modules() if isinstance(module, bnb.nn.Linear4bit)]


def _reason_to_skip(module) -> str | None:
    if getattr(module, "nybble_streamed", False):
        return "streamed: nybble.stream multiplies with nybble already"
    return foreign_forward(module)


def _check_found(model, reports) -> None:
    if any(report.path != "unpatched" for report in reports):
        return
    looked_for = "looked for bitsandbytes.nn.Linear4bit modules (and their subclasses), also inside PEFT layers"
    if reports:
        raise ValueError(f"nothing to patch: {looked_for}; all {len(reports)} stay as they are: {reports[0].reason}")
    kinds = Counter(
        type(module).__name__
        for module in model.modules()
        if isinstance(module, (torch.nn.Linear, bnb.nn.Linear8bitLt))
    )
    found = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no linear at all"
    remedy = (
        "8-bit modules are not supported: load the model with load_in_4bit=True"
        if "Linear8bitLt" in kinds
        else "load the model with quantization_config=BitsAndBytesConfig(load_in_4bit=True, "
        'bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)'
    )
    raise ValueError(f"nothing to patch: {looked_for}, found {found}; {remedy}")


def _check_fused(reports) -> None:
    off = [report for report in reports if report.path != "fused"]
    if off:
        raise UnsupportedError(
            f'mode="fused", but {len(off)} of {len(reports)} modules have no fused path, e.g. {off[0].name}: '
            f'{off[0].reason}; or use mode="auto"'
        )
