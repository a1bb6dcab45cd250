"""Finds and loads the one native library: torch ops and C ABI. Nothing else here knows where it lives."""

from __future__ import annotations

import ctypes
import json
import os
import pathlib

import torch

from .support import require_torch

_NAME = "libnybble_torch.so"


def _candidates() -> list[pathlib.Path]:
    build = os.environ.get("NYBBLE_BUILD_DIR")
    if build:
        return [pathlib.Path(build) / "binding" / _NAME]
    return [pathlib.Path(__file__).parent / "_lib" / _NAME]


def find() -> pathlib.Path:
    """The library's path: $NYBBLE_BUILD_DIR/binding (a development build) or the installed package. ImportError
    when it is not there.
    """
    for path in _candidates():
        if path.is_file():
            return path.resolve()
    looked = ", ".join(str(path) for path in _candidates())
    raise ImportError(
        f"nybble's native library was not found (looked for {looked}). Install the wheel, or run `make build` and set "
        "NYBBLE_BUILD_DIR to the build folder."
    )


require_torch(torch.__version__)
path = find()
torch.ops.load_library(str(path))
lib = ctypes.CDLL(str(path))

lib.nybble_version.restype = ctypes.c_char_p
lib.nybble_build_info.restype = ctypes.c_char_p
lib.nybble_last_error.restype = ctypes.c_char_p
lib.nybble_path_name.restype = ctypes.c_char_p
lib.nybble_launches.restype = ctypes.c_int64


def last_error() -> tuple[str, int]:
    """Text and kind of this thread's last failure in the library; ("", -1) before the first."""
    return lib.nybble_last_error().decode(), lib.nybble_last_error_kind()


def build_info() -> dict:
    """What this library is and what it runs on.

    Returns a dict: version, compiler, build_type, flags (of the C++ compiler), cuda (version of nvcc, None in a CPU
    build), cuda_targets, built_for_torch, torch (the version that is running), torch_cuda (its CUDA version or None),
    library (path).
    """
    info = json.loads(lib.nybble_build_info().decode())
    info.update(torch=torch.__version__, torch_cuda=torch.version.cuda, library=str(path))
    return info
