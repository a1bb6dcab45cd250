"""What patch() did, per module, in words."""

from __future__ import annotations

import dataclasses
from collections import Counter

import torch


@dataclasses.dataclass(frozen=True)
class ModuleReport:
    """One module. path: "fused" (from the packed bytes), "dequant" (a dense weight, then torch's own multiply) or
    "unpatched"; the path holds for training, 512 tokens. reason: why not fused, None where it is.
    """

    name: str
    path: str
    reason: str | None
    shape: tuple[int, int] | None
    compute_dtype: torch.dtype | None


@dataclasses.dataclass(frozen=True)
class PatchReport:
    """Every 4-bit module of a model. changed: how many modules this call patched."""

    mode: str
    modules: tuple[ModuleReport, ...]
    changed: int

    def __getitem__(self, name: str) -> ModuleReport:
        """The entry of one module, by its name in model.named_modules(). KeyError for any other name."""
        for module in self.modules:
            if module.name == name:
                return module
        raise KeyError(name)

    def __str__(self) -> str:
        groups = Counter((module.path, module.reason) for module in self.modules)
        first = {}
        for module in self.modules:
            first.setdefault((module.path, module.reason), module.name)
        before = sum(module.path != "unpatched" for module in self.modules) - self.changed
        lines = [f"nybble patched {self.changed} of {len(self.modules)} 4-bit modules, mode {self.mode!r}"]
        if before:
            lines[0] += f" ({before} were patched before)"
        for (path, reason), count in groups.items():
            example = first[path, reason] or "the module itself"
            lines.append(
                f"  {count:5} {path:9} {example}{', ...' if count > 1 else ''}{f': {reason}' if reason else ''}"
            )
        return "\n".join(lines)


def reason_in_words(text: str, compute_dtype: torch.dtype | None) -> str:
    """The plan's reason against a fused path, with what a user can do about it."""
    if compute_dtype == torch.float32:
        return (
            "compute dtype float32 keeps this module off the fused path; set bnb_4bit_compute_dtype=torch.bfloat16 "
            "in BitsAndBytesConfig"
        )
    return text
