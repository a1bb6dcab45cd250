"""What only a GPU has: streams, torch's allocator, page-locked memory."""

import gc
import warnings

import pytest
import torch
from tiny_models import LAYERS, assert_equal, checkpointed, resident_model, step, streamed_model, with_adapters

import nybble
from nybble.streaming import native

LATE = {"poison": True, "land_at_wait": True}


@pytest.fixture
def store(stores):
    if stores().device.type != "cuda":
        pytest.skip("about CUDA only")
    return stores()


@pytest.fixture
def expected(store):
    return step(checkpointed(with_adapters(resident_model(store))))


@pytest.mark.parametrize("options", [LATE, {"delay_us": 3000}, {}], ids=["at wait", "delayed", "prompt"])
def test_steps_that_change_streams_are_exact(store, expected, options):
    model = checkpointed(with_adapters(streamed_model(store, **options)))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()  # the model was made on the default stream
    for stream in (side, torch.cuda.default_stream(), side):
        with torch.cuda.stream(stream):
            found = step(model)
        stream.synchronize()
        assert_equal(found, expected, at_least=4 * LAYERS)


def test_slots_come_from_torchs_allocator_and_go_back(store):
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = streamed_model(store)
    stats = nybble.memory_stats(model)
    assert torch.cuda.memory_allocated() - before >= stats["slot_bytes"] + stats["resident_bytes"] > 0
    assert stats["pinned_bytes"] == stats["host_bytes"] > 0
    del model
    gc.collect()
    assert torch.cuda.memory_allocated() - before < stats["slot_bytes"]


def test_memory_that_can_not_be_locked_is_one_warning_or_an_error(store, expected, monkeypatch):
    monkeypatch.setattr(native.Arena, "pin", lambda arena: (4096, "refused"))
    with pytest.warns(UserWarning, match=r"could not be page-locked \(refused\).*stay pageable") as seen:
        model = checkpointed(with_adapters(streamed_model(store, **LATE)))
    assert len([w for w in seen if "page-locked" in str(w.message)]) == 1
    assert nybble.memory_stats(model)["pinned_bytes"] == 4096
    assert_equal(step(model), expected, at_least=4 * LAYERS)
    with pytest.raises(MemoryError, match="could not be page-locked"):
        streamed_model(store, pin=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert nybble.memory_stats(streamed_model(store, pin=False))["pinned_bytes"] == 0


def test_a_model_on_the_cpu_moves_to_the_gpu_but_for_its_slots(store, expected):
    on_cpu = type(store)(store)
    on_cpu.device = torch.device("cpu")
    model = checkpointed(nybble.stream(with_adapters(resident_model(on_cpu)), store, device="cuda", **LATE))
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    assert_equal(step(model), expected, at_least=4 * LAYERS)
