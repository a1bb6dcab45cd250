"""Which layers keep their activations: per layer, mixed with both variants of checkpointing, and by measure."""

import pytest
import torch
from tiny_models import (
    ALL_LINEARS,
    LAYERS,
    assert_equal,
    batches,
    checkpointed,
    loss_of,
    resident_model,
    saved_elsewhere,
    step,
    streamed_model,
    with_adapters,
)

import nybble
from nybble.streaming import activations
from nybble.streaming.activations import AutoKeep

LATE = {"poison": True, "land_at_wait": True}


class Meter:
    """A device on which a recomputation raises what is allocated from 1000 to 1100 bytes, and a step's peak is 1500
    allocated, 1800 reserved.
    """

    def __init__(self, limit: float):
        self.bytes, self.failed, self.recomputed, self.reserved = limit, 0, False, 1800

    def allocated(self):
        return 1100 if self.recomputed else 1000

    def limit(self):
        return self.bytes

    def start(self):
        pass

    def peaks(self):
        return 1500, self.reserved

    def failures(self):
        return self.failed


class Bodies:
    """Counts how often the layers' bodies run."""

    def __init__(self, model):
        self.count = 0
        for layer in model.get_base_model().model.layers:
            layer.mlp.register_forward_pre_hook(self._run)

    def _run(self, *_):
        self.count += 1

    def during(self, call):
        before = self.count
        return call(), self.count - before


@pytest.fixture(scope="module")
def resident(stores):
    return with_adapters(resident_model(stores()), ALL_LINEARS)


@pytest.fixture(scope="module")
def expected(resident):
    return step(checkpointed(resident))


def limit_for(keeps: int) -> float:
    """By hand: charge 1.2, 1000 allocated now, 500 more at the peak, 100 a layer; half a layer beyond."""
    return 1.2 * (1000 + 500 + 100 * (keeps + 0.5)) / (1 - activations.MARGIN)


MIXED = {
    "all": ("keep", LAYERS),
    "number": (2, 2),
    "one": (1, 1),
    "none": (0, 0),
    "list": (["keep", "recompute", "keep", "recompute", "recompute"], 2),
    "function": (lambda index: "keep" if index % 2 else "recompute", 2),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("policy", MIXED)
def test_a_layer_that_keeps_is_not_recomputed_and_gradients_are_equal(stores, expected, policy, reentrant):
    given, keeps = MIXED[policy]
    model = checkpointed(with_adapters(streamed_model(stores(), activations=given, **LATE), ALL_LINEARS), reentrant)
    found, bodies = Bodies(model).during(lambda: step(model))
    assert_equal(found, expected, at_least=14 * LAYERS)
    assert bodies == 2 * LAYERS - keeps
    assert nybble.memory_stats(model)["layers_that_keep"] == keeps


@pytest.mark.parametrize("outside", [torch.autograd.graph.save_on_cpu, saved_elsewhere])
def test_some_layers_keep_under_hooks_outside_and_with_two_live_graphs(stores, resident, outside):
    def run(model):
        checkpointed(model).zero_grad(set_to_none=True)
        with outside():
            first, second = (loss_of(model, ids) for ids in batches(2))
            (first - 0.5 * second).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

    model = with_adapters(streamed_model(stores(), activations=3, **LATE), ALL_LINEARS)
    assert_equal(run(model), run(resident), at_least=14 * LAYERS)


def saved_outside(model) -> tuple[dict, list[torch.Tensor]]:
    """A step under hooks outside, and the tensors that they were given."""
    seen = []

    def pack(tensor):
        seen.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return step(model), seen


def test_hooks_outside_are_given_what_a_layer_keeps_and_none_of_its_weights(stores, expected):
    """A resident model's are: its packed weights are saved as any tensor. Without checkpoints both save everything."""
    resident = with_adapters(resident_model(stores()), ALL_LINEARS).train()
    resident.enable_input_require_grads()
    found, seen = saved_outside(resident)
    assert_equal(found, expected, at_least=14 * LAYERS)
    floats = sorted(tuple(tensor.shape) for tensor in seen if tensor.dtype == torch.float32 and tensor.dim() == 3)
    assert sum(tensor.dtype == torch.uint8 for tensor in seen) >= 7 * LAYERS and len(floats) > 14 * LAYERS

    model = with_adapters(streamed_model(stores(), activations="keep", **LATE), ALL_LINEARS).train()
    model.enable_input_require_grads()
    found, seen = saved_outside(model)
    assert_equal(found, expected, at_least=14 * LAYERS)
    slots = {slot.untyped_storage().data_ptr() for slot in model.get_base_model()._nybble_streamed.slots}
    assert not any(tensor.dtype == torch.uint8 or tensor.untyped_storage().data_ptr() in slots for tensor in seen)
    assert sorted(tuple(t.shape) for t in seen if t.dtype == torch.float32 and t.dim() == 3) == floats


def packed_weights(loss):
    """What the multiplies of a graph saved, last layer first: each read when it is asked for."""
    seen, ahead = set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop(0)
        if node not in seen:
            seen.add(node)
            ahead += [following for following, _ in node.next_functions if following is not None]
            if node.name() == "LinearFunctionBackward":
                yield node.saved_tensors[0].flatten()


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_kept_graph_saved_can_be_read_outside_a_backward(stores, expected, fails):
    """As one who looks at a graph does; also after a backward that never came to its end."""
    resident = with_adapters(resident_model(stores()), ALL_LINEARS).train()
    resident.enable_input_require_grads()
    model = checkpointed(with_adapters(streamed_model(stores(), activations="keep", **LATE), ALL_LINEARS))
    loss, right = (loss_of(each, batches(1)[0]) for each in (model, resident))
    if fails:
        hook = next(p for p in model.parameters() if p.requires_grad).register_hook(lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, batches(1)[0]).backward()
        hook.remove()
    same = [torch.equal(*pair) for pair in zip(packed_weights(loss), packed_weights(right), strict=True)]
    assert same == [True] * 7 * LAYERS
    del loss
    assert_equal(step(model), expected, at_least=14 * LAYERS)


def auto_model(stores, monkeypatch, meter):
    ends = AutoKeep.recomputation_ends

    def recomputed(auto, layer):
        meter.recomputed = True
        ends(auto, layer)
        meter.recomputed = False

    monkeypatch.setattr(AutoKeep, "recomputation_ends", recomputed)
    monkeypatch.setattr(activations, "meter_of", lambda device: meter)
    return checkpointed(with_adapters(streamed_model(stores(), activations="auto", **LATE), ALL_LINEARS))


@pytest.mark.parametrize("keeps", [0, 2, LAYERS])
def test_auto_keeps_what_the_measured_step_allows(stores, expected, monkeypatch, keeps):
    model = auto_model(stores, monkeypatch, Meter(limit_for(keeps)))
    bodies = Bodies(model)
    for kept in (0, keeps, keeps):  # the first step is the measured one
        found, ran = bodies.during(lambda: step(model))
        assert_equal(found, expected, at_least=14 * LAYERS)
        assert ran == 2 * LAYERS - kept
    assert nybble.memory_stats(model)["layers_that_keep"] == keeps


def test_a_forward_that_changes_the_choice_leaves_live_graphs_alone(stores, resident, monkeypatch):
    """The first graph was recorded with three layers that keep, the second with none, then both run backward."""
    meter = Meter(limit_for(3))
    model = auto_model(stores, monkeypatch, meter)
    step(model)

    def run(model, between):
        model.zero_grad(set_to_none=True)
        first = loss_of(model, batches(1)[0])
        between()
        (first + loss_of(model, batches(2)[1])).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

    kept = []

    def shrink():
        kept.append(nybble.memory_stats(model)["layers_that_keep"])
        meter.bytes = 0

    assert_equal(run(model, shrink), run(checkpointed(resident), lambda: None), at_least=14 * LAYERS)
    assert [*kept, nybble.memory_stats(model)["layers_that_keep"]] == [3, 0]


def test_auto_keeps_less_after_memory_ran_out_and_says_so(stores, expected, monkeypatch):
    meter = Meter(limit_for(4))
    model = auto_model(stores, monkeypatch, meter)
    step(model)
    step(model)
    assert nybble.memory_stats(model)["layers_that_keep"] == 4
    meter.failed += 1
    meter.reserved = 2280  # 1.2 * (1000 + 500 + 4 * 100)
    with pytest.warns(UserWarning, match=rf"ran out of memory while 4 of {LAYERS} layers kept") as seen:
        found = step(model)
    assert len([w for w in seen if "ran out" in str(w.message)]) == 1
    assert_equal(found, expected, at_least=14 * LAYERS)
    # 0.85 of what was reserved: 2280 * 0.85 / 1.2 - 1500 = 115 bytes, one layer
    assert nybble.memory_stats(model)["layers_that_keep"] == 1


def test_the_choice_follows_the_tokens_and_what_is_allocated():
    class Visit:
        keep = False

    class Scripted(Meter):
        level = 0

        def allocated(self):
            return self.level

    visits, meter = [Visit() for _ in range(10)], Scripted(10_000)
    meter.level = 1000
    auto = AutoKeep(visits, meter)
    auto.forward_begins(64)
    auto.recomputation_begins(3)
    meter.level = 1400
    auto.recomputation_ends(3)
    meter.level = 2000  # optimiser states came
    auto.forward_begins(64)  # 0.97 * 10000 / 1.2 = 8083; less 2000 and 500: 5583 of 400 a layer
    assert auto.keeps == 10
    auto.forward_begins(128)  # 8083 - 2000 - 1000 = 5083 of 800
    assert auto.keeps == 6 and [v.keep for v in visits] == [False] * 4 + [True] * 6
    meter.level = 7000
    auto.forward_begins(64)  # 583 of 400
    assert auto.keeps == 1
    meter.level = 9000
    auto.forward_begins(64)
    assert auto.keeps == 0


def test_auto_without_a_gpu_is_refused(stores):
    if stores().device.type != "cpu":
        pytest.skip("about the CPU")
    with pytest.raises(nybble.UnsupportedError, match="measures the memory of a GPU, found device cpu"):
        streamed_model(stores(), activations="auto")


@pytest.mark.parametrize("wrong", ["offload", ["keep"], LAYERS + 1, -1, True, None, lambda index: "some"])
def test_policies_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match=f"each of {LAYERS} layers"):
        activations.fixed(wrong, LAYERS)


def test_auto_on_a_gpu_keeps_within_the_limit_and_is_exact(stores, resident, expected):
    if stores().device.type != "cuda":
        pytest.skip("about CUDA only")
    model = checkpointed(with_adapters(streamed_model(stores(), activations="auto", **LATE), ALL_LINEARS))
    bodies = Bodies(model)
    for kept in (0, LAYERS):
        found, ran = bodies.during(lambda: step(model))
        assert_equal(found, expected, at_least=14 * LAYERS)
        assert ran == 2 * LAYERS - kept
    assert torch.cuda.max_memory_reserved() <= torch.cuda.get_device_properties(0).total_memory
