"""The exceptions of nybble. Every message says what was found, what was expected and what to do."""

from __future__ import annotations

import torch

from . import _library


class StaleWeightError(RuntimeError):
    """A recycled buffer no longer (or not yet) holds the 4-bit weight that an operation was about to read."""


class UnsupportedError(NotImplementedError):
    """Asked for something that this build, card or torch does not have."""


# nybble::ErrorKind, in its order.
_TYPES = (
    ValueError,  # value
    TypeError,  # type
    ValueError,  # format
    OSError,  # io
    torch.OutOfMemoryError,  # memory, host or device
    UnsupportedError,  # unsupported
    StaleWeightError,  # stale weight
    RuntimeError,  # cuda
)


def translate(error: Exception) -> Exception:
    """The exact exception for an error that came out of an op of ours; any other error comes back as it is.

    The stable ABI carries only the text through torch. The library keeps kind and text of this thread's last failure:
    equal texts mean that it is ours.
    """
    text, kind = _library.last_error()
    message = str(error)
    if not text or text not in message or not 0 <= kind < len(_TYPES):
        return error
    return _TYPES[kind](text)


def check(status: int) -> None:
    """Raises what a failed call of the C ABI reported. Used by everything that calls it."""
    if status != 0:
        text, kind = _library.last_error()
        raise (_TYPES[kind] if 0 <= kind < len(_TYPES) else RuntimeError)(text)
