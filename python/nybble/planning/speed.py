"""What bounds a step: bytes over the link against floating-point operations. Arithmetic only."""

from __future__ import annotations

import dataclasses

from .rates import Rates
from .source import ModelSource
from .trace import Step

PAYS = 0.03  # a smaller share of the step is not worth a change


@dataclasses.dataclass
class Speed:
    """Seconds of one step (all accumulated batches) if nothing but that mattered. tokens_to_hide: in one batch, from
    which on the multiplies take longer than the copies.
    """

    link_bytes: int
    flops: int
    link_s: float
    compute_s: float
    decode_s: float
    tokens_to_hide: int

    @property
    def bound(self) -> str:
        return "link" if self.link_s > self.compute_s else "compute"


def link_bytes(layer_bytes: list[int], window: int) -> int:
    """Bytes of a batch's copies once training runs: forward finds the first `window` layers in the slots, where the
    backward before left them, and backward the last ones.
    """
    window = min(window, len(layer_bytes))
    return sum(layer_bytes[window:]) + sum(layer_bytes[: len(layer_bytes) - window])


def passes(layers: int, keep: int) -> int:
    """Multiplies by every layer's weights in a batch: forward and grad_x, and forward again where it is recomputed."""
    return 2 * layers + (layers - keep)


def flops(source: ModelSource, step: Step) -> int:
    """Of one batch. A multiply of t tokens by n x k weights is 2 t n k; attention is causal, so half of t^2."""
    config, length = source.config, step.tokens // step.rows
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    total, layers = 0, len(source.layers)
    for index, layer in enumerate(source.layers):
        again = 1 if index < layers - step.keep else 0
        base = sum(n * k for n, k in layer.values())
        adapted = [
            shape for path, shape in layer.items() if not step.targets or path.rpartition(".")[2] in step.targets
        ]
        lora = step.rank * sum(n + k for n, k in adapted)
        attention = 2 * heads * dim * step.tokens * length  # scores and values, over half of the square
        total += 2 * step.tokens * base * (2 + again)
        total += 2 * step.tokens * lora * (3 + again)
        total += attention * (1 + again) + attention * 5 // 2
    return total + 4 * step.tokens * config.vocab_size * config.hidden_size


def forecast(source: ModelSource, step: Step, window: int, batches: int, rates: Rates) -> Speed:
    """Bounds of a step of `batches` accumulated batches."""
    copied = link_bytes(source.layer_bytes, window) * batches
    work = flops(source, step) * batches
    # dequantising reads 4 bits and a scale and writes 2 bytes a weight, in every pass
    decoded = (source.base_bytes + 2 * source.weights) * passes(len(source.layers), step.keep) / len(source.layers)
    link_s, compute_s = copied / (rates.link_gb_s * 1e9), work / (rates.gemm_tflops * 1e12)
    per_token = compute_s / (step.tokens * batches)
    hide = int(link_s / batches / per_token) + 1 if copied else 0
    return Speed(copied, work, link_s, compute_s, decoded * batches / (rates.memory_gb_s * 1e9), hide)


def remarks(speed: Speed, dense_bytes: int) -> list[str]:
    """Whether fusing pays, in words. dense_bytes: of the largest dense weight that dequantising would make."""
    saved = f"it saves a dense weight of {dense_bytes / 2**20:.0f} MiB for a moment"
    if speed.compute_s + speed.decode_s < speed.link_s:
        return [f"Fusing saves no time here: dequantising would hide behind the copies; {saved}."]
    share = speed.decode_s / (speed.compute_s + speed.decode_s)
    if share < PAYS:
        return [f"Fusing hardly pays in time: dequantising would take {share:.1%} of the step; {saved}."]
    return [
        f"Dequantising before each multiply would take {share:.0%} of the step; the fused multiply leaves that out."
    ]
