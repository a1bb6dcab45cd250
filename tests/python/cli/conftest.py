"""The built command, and small random models for it to convert."""

import hashlib
import os
import subprocess
from pathlib import Path

import pytest
import torch

BUILD = Path(os.environ.get("NYBBLE_BUILD_DIR", "build/dev"))
# A killed or crashed command must not leave a core file behind, and messages must be in English.
ENVIRONMENT = {**os.environ, "LC_ALL": "C"}


def command_path() -> Path:
    """$NYBBLE_COMMAND (an installed one), else that of the build folder."""
    path = Path(os.environ.get("NYBBLE_COMMAND") or BUILD / "cli" / "nybble")
    if not path.exists():
        raise pytest.UsageError(f"{path} does not exist: build it, or set NYBBLE_BUILD_DIR")
    return path


@pytest.fixture(scope="session")
def nybble():
    """nybble(*arguments, preload=None, env={}) -> CompletedProcess with text output."""
    path = command_path()

    def run(*arguments, env=None, **options):
        command = [str(path), *map(str, arguments)]
        return subprocess.run(
            command, text=True, capture_output=True, timeout=300, env={**ENVIRONMENT, **(env or {})}, **options
        )

    return run


def tiny_config(**changes):
    from transformers import LlamaConfig

    # 96 and 200 are no multiples of 256: scales of odd sizes need padding.
    return LlamaConfig(
        **{
            "hidden_size": 96,
            "intermediate_size": 200,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 130,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
            **changes,
        }
    )


def save_model(folder: Path, dtype=torch.bfloat16, shard="60KB", **changes):
    """Saves a random Llama in shards and loads it again (.to() alone would round its rotary buffer too)."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(7)
    LlamaForCausalLM(tiny_config(**changes)).to(dtype).save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """A sharded bf16 checkpoint; nobody writes to it."""
    folder = tmp_path_factory.mktemp("model") / "source"
    save_model(folder)
    return folder


def digest(folder: Path) -> str:
    """SHA-256 over the names and bytes of all files of a folder."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            total.update(str(path.relative_to(folder)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()
