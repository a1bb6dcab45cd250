"""Whether this machine can run the gates that train."""

from __future__ import annotations

import importlib

PACKAGES = ("transformers", "peft", "bitsandbytes")


def missing() -> str | None:
    """Why no model can be made here, or None."""
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken install fails in many ways
            return f"needs {name}: {type(error).__name__}: {error}"
    return None
