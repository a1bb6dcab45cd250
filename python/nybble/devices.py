"""The first use of each device: an error where this build cannot use it, one warning where it works less well."""

from __future__ import annotations

import ctypes
import sys
import warnings

import torch

from ._library import build_info, lib
from .errors import UnsupportedError, check
from .support import reason_against

_TEXT_BYTES = 1024
_seen: set[torch.device] = set()


def device_note(device: torch.device) -> str:
    """In what the library works less well on a device than on others, "" for nothing. UnsupportedError, with the
    reason, where it does not work: another maker's device, a build without CUDA, a driver too old for the build, a
    card that the build has no code for.
    """
    against = reason_against(device, built_for_cuda=build_info()["cuda"] is not None)
    if against is not None:
        raise UnsupportedError(f"a tensor is {against}")
    index = -1 if device.type == "cpu" else torch.cuda.current_device() if device.index is None else device.index
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    check(lib.nybble_device_note(index, text, ctypes.c_size_t(_TEXT_BYTES)))
    return text.value.decode()


def first_use(x: torch.Tensor) -> None:
    """Called with an operand before each launch. Says what device_note() says, once a device."""
    if not torch.compiler.is_compiling() and x.device not in _seen:
        _introduce(x)


def _introduce(x: torch.Tensor) -> None:
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if x.is_meta or (fake is not None and isinstance(x, fake.FakeTensor)):
        return  # shapes only: the device need not exist
    note = device_note(x.device)
    _seen.add(x.device)
    if note:
        warnings.warn(f"nybble: {note}", stacklevel=4)
