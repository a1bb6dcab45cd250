"""What a streamed run needs and what bounds it, before it runs."""

from __future__ import annotations

from .forecast import plan_training
from .report import Plan

__all__ = ["Plan", "plan_training"]
