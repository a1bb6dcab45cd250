"""Threads: two models at once are exact; one model in two threads is an error for the one that comes second, and right
for the first.
"""

import concurrent.futures
import contextlib
import threading
import time

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
from nybble.streaming import visit

LATE = {"land_at_wait": True}
REFUSED = "run from two threads at once"


@pytest.fixture(scope="module")
def expected(stores):
    return step(checkpointed(with_adapters(resident_model(stores()))))


@pytest.fixture(params=["recompute", "reentrant", "keep"])
def model(request, stores):
    activations = "keep" if request.param == "keep" else "recompute"
    streamed = with_adapters(streamed_model(stores(), activations=activations, **LATE))
    return checkpointed(streamed, reentrant=request.param == "reentrant")


@pytest.fixture
def impatient(monkeypatch):
    """A backward that is halted is taken for one that runs after a moment."""
    monkeypatch.setattr(visit, "_PATIENCE_MS", 30)


class Halt:
    """Halts the first thread that comes by, until go_on."""

    def __init__(self):
        self.inside, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *_):
        if not self.inside.is_set():
            self.inside.set()
            assert self.go_on.wait(60)


@contextlib.contextmanager
def in_another_thread(halt: Halt, call):
    """Runs `call` until it halts; goes on after the body. Yields its future."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(call)
        try:
            assert halt.inside.wait(60)
            yield found
        finally:
            halt.go_on.set()
        found.exception(60)


def lora_gradients(model) -> dict:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def adapter(model, layer: int = 2) -> torch.nn.Parameter:
    return next(p for name, p in model.named_parameters() if f"layers.{layer}.self_attn.v_proj.lora_B" in name)


def test_two_models_stream_at_once_each_in_its_thread(stores, expected):
    models = [checkpointed(with_adapters(streamed_model(stores(), window=w, **LATE))) for w in (2, 3)]
    for _ in range(2):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            found = list(pool.map(step, models))
        for gradients in found:
            assert_equal(gradients, expected, at_least=4 * LAYERS)


def test_one_model_in_two_threads_is_an_error_and_then_exact_again(stores, expected):
    model, halt = checkpointed(with_adapters(streamed_model(stores(), **LATE))), Halt()
    hook = model.get_base_model().model.layers[1].mlp.register_forward_pre_hook(halt)

    def run():
        with torch.no_grad():
            return loss_of(model, batches(1)[0])

    with in_another_thread(halt, run) as other, pytest.raises(RuntimeError, match=REFUSED):
        run()
    assert torch.isfinite(other.result())
    hook.remove()
    assert_equal(step(model), expected, at_least=4 * LAYERS)


def test_a_refused_visit_leaves_the_others_visit_of_that_layer_open(stores):
    model, halt, scales = streamed_model(stores(), **LATE), Halt(), []
    up = model.model.layers[0].mlp.up_proj

    def read(*_):
        halt()
        scales.append(up.weight.quant_state.absmax.clone())

    def run():
        with torch.no_grad():
            return model(input_ids=batches(1, model.device)[0]).logits

    hook = model.model.layers[0].mlp.register_forward_pre_hook(read)
    with in_another_thread(halt, run) as other, pytest.raises(RuntimeError, match=REFUSED):
        run()
    hook.remove()
    assert other.exception() is None and len(scales) == 1
    with pytest.raises(nybble.StaleWeightError):
        _ = up.weight.quant_state.absmax


@pytest.mark.parametrize("layer", [2, LAYERS - 1])  # the last one is in its slot when a backward begins
def test_a_forward_beside_anothers_backward_is_an_error_and_the_backward_is_exact(impatient, model, expected, layer):
    """Amid a layer's backward, where no visit is open."""
    model.zero_grad(set_to_none=True)
    loss, halt = loss_of(model, batches(1)[0]), Halt()
    hook = adapter(model, layer).register_hook(halt)
    with in_another_thread(halt, loss.backward) as backward, torch.no_grad():
        for _ in range(2):
            with pytest.raises(RuntimeError, match=REFUSED):
                loss_of(model, batches(1)[0])
    hook.remove()
    assert backward.exception() is None
    assert_equal({"loss 0": loss.detach(), **lora_gradients(model)}, expected, at_least=4 * LAYERS)
    assert_equal(step(model), expected, at_least=4 * LAYERS)


def test_a_backward_beside_anothers_forward_is_an_error_and_the_forward_is_exact(model, expected):
    loss, halt = loss_of(model, batches(1)[0]), Halt()
    with torch.no_grad():
        alone = loss_of(model, batches(1)[0])
    hook = model.get_base_model().model.layers[1].mlp.register_forward_pre_hook(halt)

    def forward():
        with torch.no_grad():
            return loss_of(model, batches(1)[0])

    with in_another_thread(halt, forward) as other, pytest.raises(RuntimeError, match=REFUSED):
        loss.backward()
    hook.remove()
    assert torch.equal(other.result(), alone)
    del loss
    assert_equal(step(model), expected, at_least=4 * LAYERS)


def test_two_backwards_at_once_are_an_error_on_the_cpu(impatient, model, expected):
    """On a GPU autograd runs both on one thread: each multiply's check of the owner sees the other's refill."""
    if model.device.type != "cpu":
        pytest.skip("about the CPU")
    model.zero_grad(set_to_none=True)
    first, second = (loss_of(model, ids) for ids in batches(1) * 2)
    halt = Halt()
    hook = adapter(model).register_hook(halt)
    with in_another_thread(halt, first.backward) as backward, pytest.raises(RuntimeError, match=REFUSED):
        second.backward()
    hook.remove()
    assert backward.exception() is None
    del second
    assert_equal(step(model), expected, at_least=4 * LAYERS)


def test_after_a_backward_that_failed_the_next_forward_is_not_taken_for_another_threads(model, expected):
    def fail(_):
        raise ZeroDivisionError("injected")

    hook = adapter(model).register_hook(fail)
    for _ in range(3):
        loss = loss_of(model, batches(1)[0])
        with pytest.raises(ZeroDivisionError) as kept:
            loss.backward()
        start = time.perf_counter()
        with torch.no_grad():
            loss_of(model, batches(1)[0])
        assert time.perf_counter() - start < 0.9, "the forward waited for a backward that was over"
    hook.remove()
    del kept, loss
    assert_equal(step(model), expected, at_least=4 * LAYERS)
