import json

import pytest
import torch

SMALL = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=8192,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    dtype="bfloat16",
    use_cache=False,
)


ABSENT = object()


@pytest.fixture(autouse=True)
def no_card(monkeypatch):
    """A plan asks the machine's card for what it is not told: here every machine is one without."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def folder(tmp_path):
    """folder(**changes): a model folder with the small config changed; ABSENT takes a field out."""

    def make(**changes):
        made = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        made.mkdir()
        fields = {name: value for name, value in (SMALL | changes).items() if value is not ABSENT}
        (made / "config.json").write_text(json.dumps(fields))
        return made

    return make
