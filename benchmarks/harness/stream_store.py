"""Shapes of real models for the streaming benchmarks. The store is the gates' (nybble.gate.training.store)."""

import pathlib

import torch

from nybble.gate.training import store
from nybble.gate.training.store import Shape

SHAPES = {
    "8b": dict(hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, vocab=128256),
    "8b-16": dict(hidden=4096, ffn=14336, layers=16, heads=32, kv_heads=8, vocab=128256),  # half of its layers
    "70b-12": dict(hidden=8192, ffn=28672, layers=12, heads=64, kv_heads=8, vocab=32000),  # of 80
    "70b-24": dict(hidden=8192, ffn=28672, layers=24, heads=64, kv_heads=8, vocab=32000),
    "32b": dict(hidden=5120, ffn=27648, layers=8, heads=40, kv_heads=8, vocab=32000),
    "mistral-8": dict(hidden=4096, ffn=14336, layers=8, heads=32, kv_heads=8, vocab=32768, family="mistral"),
    "qwen2-8": dict(hidden=3584, ffn=18944, layers=8, heads=28, kv_heads=4, vocab=152064, family="qwen2"),
    "qwen3-8": dict(hidden=4096, ffn=12288, layers=8, heads=32, kv_heads=8, vocab=151936, family="qwen3"),
    "tiny": dict(hidden=64, ffn=192, layers=4, heads=4, kv_heads=2, vocab=256),
}


def write_store(folder: pathlib.Path, shape: dict, device: torch.device) -> pathlib.Path:
    """A random NF4 store of that shape; every layer has bytes of its own."""
    return store.write_store(folder, Shape(**shape), device)
