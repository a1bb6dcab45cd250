"""What a streamed run needs and what bounds it, before it runs."""

from __future__ import annotations

__all__ = ["Plan", "plan_training"]


def __getattr__(name: str):
    # They need transformers and peft, the command's help does not.
    if name == "Plan":
        from .report import Plan

        return Plan
    if name == "plan_training":
        from .forecast import plan_training

        return plan_training
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
