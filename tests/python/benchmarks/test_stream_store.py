"""Generated stores of every family stream with the resident model's gradients."""

import pytest
import torch
from transformers import AutoConfig

import nybble
from nybble.gate.training.models import with_adapters
from nybble.gate.training.store import FAMILIES, Shape, write_store

CPU = torch.device("cpu")


def gradients(model, ids):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_generated_store_of_the_family_streams_with_the_resident_gradients(tmp_path, family):
    store = write_store(tmp_path / "store", Shape(64, 192, 3, 4, 2, 64, family), CPU)
    assert AutoConfig.from_pretrained(store).model_type == family
    ids = torch.randint(0, 64, (2, 7))
    streamed = with_adapters(nybble.stream(None, store, device=CPU), ("q_proj", "v_proj"))
    resident = with_adapters(nybble.unstream(nybble.stream(None, store, device=CPU)), ("q_proj", "v_proj"))
    assert nybble.patch(resident.get_base_model()).changed == 7 * 3
    found, expected = gradients(streamed, ids), gradients(resident, ids)
    assert len(found) == len(expected) == 1 + 2 * 2 * 3
    assert all(t.any() for t in expected) and all(map(torch.equal, found, expected))
