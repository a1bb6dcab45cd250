"""What only a GPU has: streams, torch's allocator, page-locked memory."""

import concurrent.futures
import gc
import warnings

import pytest
import torch
from tiny_models import (
    LAYERS,
    assert_equal,
    batches,
    checkpointed,
    loss_of,
    resident_model,
    step,
    streamed_model,
    with_adapters,
)

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


def on_devices(store, devices) -> list:
    made = [type(store)(store) for _ in devices]
    for found, device in zip(made, devices, strict=True):
        found.device = torch.device(device)
    return made


def forwards_then_backwards(models) -> list[dict]:
    """One step of each; every forward before the first backward, so that both have a live graph."""
    for model in models:
        model.zero_grad(set_to_none=True)
    losses = [loss_of(model, batches(1)[0]) for model in models]
    for loss in losses:
        loss.backward()
    return [
        {"loss 0": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}}
        for loss, model in zip(losses, models, strict=True)
    ]


def run_on_both(stores_of, options) -> None:
    expected = [step(checkpointed(with_adapters(resident_model(store)))) for store in stores_of]
    models = [
        checkpointed(with_adapters(streamed_model(store, window=window, **options)))
        for store, window in zip(stores_of, (2, 3), strict=True)
    ]

    def require(found) -> None:
        for gradients, wanted in zip(found, expected, strict=True):
            assert_equal(gradients, wanted, at_least=4 * LAYERS)

    require([step(model) for model in models])
    require(forwards_then_backwards(models))
    for _ in range(3):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            require(list(pool.map(step, models)))
    for store, model in zip(stores_of, models, strict=True):
        streamed = model.get_base_model()._nybble_streamed
        assert {slot.device for slot in streamed.slots} == {p.device for p in model.parameters()} == {store.device}
        assert nybble.memory_stats(model)["refills"] > 3 * LAYERS  # layers move in every step


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("options", [LATE, {"delay_us": 3000}], ids=["at wait", "delayed"])
def test_two_devices_in_one_process_in_turn_and_in_two_threads(store, options, current):
    """current: torch's device while the models run; a thread starts with 0."""
    if torch.cuda.device_count() < 2:
        pytest.skip("not run: fewer than two GPUs here")
    with torch.cuda.device(current):
        run_on_both(on_devices(store, ("cuda:0", "cuda:1")), options)
