"""What bounds a streamed step in h200_stream.py: the link, the multiplies' rate, and the ring with little around it."""

import time

import torch

from nybble.streaming import native


def seconds(call, count: int, sync) -> float:
    """Per call, after one that does not count."""
    call()
    sync()
    start = time.perf_counter()
    for _ in range(count):
        call()
    sync()
    return (time.perf_counter() - start) / count


def link_and_gemm(layer_bytes: int, device: torch.device, sync) -> dict[str, float]:
    """GB/s of copies of one layer from page-locked and from pageable memory, TFLOP/s of a large bf16 multiply."""
    pageable = torch.ones(layer_bytes, dtype=torch.uint8)
    host = pageable.pin_memory()
    to = torch.empty(layer_bytes, dtype=torch.uint8, device=device)
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    return {
        "h2d_gb_s": layer_bytes / seconds(lambda: to.copy_(host, non_blocking=True), 20, sync) / 1e9,
        "pageable_gb_s": layer_bytes / seconds(lambda: to.copy_(pageable), 5, sync) / 1e9,
        "gemm_tflops": 2 * 8192**3 / seconds(lambda: torch.mm(a, a), 20, sync) / 1e12,
    }


def stack(streamed, tokens: int, rate_gb_s: float | None, sync) -> dict:
    """A training step's visits with nothing but the multiplies in them."""
    ring, layers, dtype = streamed.fetcher, len(streamed.streamed.layers), torch.bfloat16
    streamed.switch("streamed")
    sides = {side for weight in streamed.weights for side in weight.stored.shape}
    x = {side: torch.randn(tokens, side, dtype=dtype, device=streamed.device) for side in sides}

    def step():
        for layer in range(layers):
            visit(layer, native.FORWARD)
        for layer in reversed(range(layers)):
            visit(layer, native.BACKWARD)

    def visit(layer: int, order: int) -> None:
        ring.acquire(layer, order)
        for weight in streamed.streamed.weights[layer]:
            n, k = weight.stored.shape
            torch.ops.nybble.linear_4bit(x[k], *weight.tensors, None, weight.uid, *weight.spec)
            if order == native.BACKWARD:
                torch.ops.nybble.linear_4bit_grad_input(x[n], *weight.tensors, weight.uid, *weight.spec)
        ring.release(layer)

    with torch.no_grad():
        step()
        copied = streamed.copied_bytes()
        step()
        copied = streamed.copied_bytes() - copied
        found = seconds(step, 5, sync)
        for call in ("acquire", "release"):
            setattr(ring, call, lambda *_: None)
        for weight in streamed.weights:
            weight.uid = None
        without = seconds(step, 5, sync)
    streamed.switch("streamed")  # puts both back
    return {
        "tokens": tokens,
        "step_ms": 1e3 * found,
        "no_copies_ms": 1e3 * without,
        "ratio_link": copied / found / (rate_gb_s * 1e9) if rate_gb_s else None,
    }
