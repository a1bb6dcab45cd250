"""The code blocks of the user pages run, on a tiny model and the CPU."""

import pathlib
import re

import peft
import pytest
import torch

from ..patching.models import LINEARS, batch, load, write_dense

DOCS = pathlib.Path(__file__).resolve().parents[3] / "docs"


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write_dense(tmp_path_factory.mktemp("dense"), "Llama")


def run_block(page: str, **names: str) -> dict:
    """Runs the one Python block of a page, with its placeholders replaced; returns its variables."""
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)
    for name, value in ({"cuda": "cpu"} | names).items():
        assert f'"{name}"' in block, f"{page} has no {name}"
        block = block.replace(f'"{name}"', repr(value))
    scope = {}
    exec(block, scope)
    return scope


def trains(model) -> None:
    ids = batch()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    gradients = [p.grad for n, p in model.named_parameters() if "lora_B" in n]
    assert len(gradients) == LINEARS and all(g.count_nonzero() > 0 for g in gradients)


def test_the_qlora_script(dense, capsys):
    scope = run_block("qlora-script.md", **{"your/model": dense})
    assert isinstance(scope["model"], peft.PeftModel)
    assert f"nybble patched {LINEARS} of {LINEARS} 4-bit modules, mode 'auto'" in capsys.readouterr().out
    trains(scope["model"].train())


def test_the_laptop_page(dense, tmp_path, capsys):
    store = tmp_path / "store"
    load(dense, torch.bfloat16).save_pretrained(store)
    scope = run_block("laptop-8gb.md", store=str(store))
    assert "'window': 2" in capsys.readouterr().out
    trains(scope["model"])


def test_a_page_without_its_placeholder_is_seen():
    with pytest.raises(AssertionError, match="has no no such name"):
        run_block("qlora-script.md", **{"no such name": ""})
