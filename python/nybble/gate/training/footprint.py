"""Bytes that a generated Llama and its steps take, estimated from above; a test holds them against measured peaks.

The terms of a step were read off peaks of torch's storages (eager attention, bf16, adapters on every projection):

    a layer that keeps    25 hidden + 8 ffn + 6 heads x length   bytes a token
    its backward           8 hidden + 4 ffn + 4 heads x length   more
    every layer            6 hidden                              its input, and the copy that is compared
    the loss              16 vocab
"""

from __future__ import annotations

from collections.abc import Iterable

from nybble.gate.training.store import Shape

PACKED_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # of a weight: nibble, nested scale, its scale
RANK = 8  # of the adapters


def layer_bytes(shape: Shape) -> float:
    """One packed layer."""
    return PACKED_BYTES * shape.weights / shape.layers


def adapter_bytes(shape: Shape) -> int:
    """Adapters on every projection, and their gradients."""
    return 4 * RANK * shape.layers * sum(n + k for n, k in shape.projections().values())


def model_bytes(shape: Shape, layers: int) -> float:
    """A model with so many packed layers on the device: all (resident), or a window."""
    return min(layers, shape.layers) * layer_bytes(shape) + 2 * shape.vocab * shape.hidden + adapter_bytes(shape)


def models_bytes(shape: Shape, windows: Iterable[int]) -> float:
    """A resident model and a streamed one for each window, and what making their store takes for a while."""
    streamed = sum(model_bytes(shape, window) for window in windows)
    return model_bytes(shape, shape.layers) + streamed + layer_bytes(shape) + 8 * shape.vocab * shape.hidden


def outcome_bytes(shape: Shape, tokens: int) -> int:
    """What a step leaves to compare: outputs of every layer, logits, gradients."""
    return 2 * tokens * (shape.layers * shape.hidden + shape.vocab) + adapter_bytes(shape) // 2


def step_bytes(shape: Shape, rows: int, length: int, *, keep: bool = False) -> int:
    """The peak of one step of rows x length tokens beside the model, with its outcome. keep: no layer is recomputed."""
    tokens, pairs = rows * length, rows * shape.heads * length**2
    kept = tokens * (25 * shape.hidden + 8 * shape.ffn) + 6 * pairs
    backward = tokens * (8 * shape.hidden + 4 * shape.ffn) + 4 * pairs
    every = tokens * (6 * shape.hidden * shape.layers + 16 * shape.vocab)
    dense = 2 * max(n * k for n, k in shape.projections().values())  # of mode="dequant"
    return every + kept * (shape.layers if keep else 1) + backward + dense + adapter_bytes(shape)
