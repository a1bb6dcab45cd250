"""What a run to plan chooses by name. Imports torch only, so that the command's help and its errors come at once."""

from __future__ import annotations

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
OPTIMISERS = ("adamw", "adamw8bit", "sgd")
