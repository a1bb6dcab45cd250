import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import nybble
from nybble import autograd
from nybble.testing.weights import Weight, spoil

from .reference import DTYPES, dequantised, quantised, relative_error
from .slots import new_uid, slot_of

LEADS = [(5,), (), (2, 3), (2, 1, 4)]


@pytest.fixture
def weight(device):
    return Weight.random(48, 64, device, torch.bfloat16)


def run(weight, x, bias=None, guard=None, mode="auto"):
    state = weight.state
    return nybble.nf4_linear(
        x,
        weight.packed,
        state.absmax,
        tuple(state.shape),
        code=state.code,
        nested_absmax=state.state2.absmax,
        nested_code=state.state2.code,
        offset=state.offset,
        bias=bias,
        guard=guard,
        mode=mode,
    )


def leaf(*shape, device, dtype=torch.bfloat16):
    return torch.randn(*shape, device=device).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("mode", ["auto", "dequant"])
def test_gradients_equal_a_float64_vjp_within_the_dense_error(lead, dtype, mode, device):
    packed, state = quantised(96, 130, dtype=dtype, device=device)
    x, bias = leaf(*lead, 130, device=device, dtype=dtype), leaf(96, device=device, dtype=dtype)
    y = nybble.linear(x, packed, state, bias, mode=mode)
    grad_y = torch.randn_like(y)
    grad_x, grad_bias = torch.autograd.grad(y, (x, bias), grad_y)
    dense = dequantised(packed, state, dtype)
    exact_x, exact_bias = grad_y.double() @ dense, grad_y.double().reshape(-1, 96).sum(0)
    floor = {torch.bfloat16: 2**-9, torch.float16: 2**-12, torch.float32: 2**-20}[dtype]
    assert grad_x.dtype == dtype and grad_bias.dtype == dtype
    assert relative_error(grad_x, exact_x) <= 1.05 * max(floor, relative_error(grad_y @ dense.to(dtype), exact_x))
    rows = grad_y.reshape(-1, 96)
    assert relative_error(grad_bias, exact_bias) <= 1.05 * max(floor, relative_error(rows.sum(0), exact_bias))


@pytest.mark.parametrize("needs", ["x", "bias", "both"])
def test_only_gradients_that_are_needed_are_computed(needs, weight, device):
    x = torch.randn(5, 64, device=device).bfloat16().requires_grad_(needs != "bias")
    bias = torch.randn(48, device=device).bfloat16().requires_grad_(needs != "x")
    run(weight, x, bias).sum().backward()
    assert (x.grad is not None) == (needs != "bias")
    assert (bias.grad is not None) == (needs != "x")


def test_weight_tensors_get_no_gradient(weight, device):
    weight.state.code.requires_grad_()
    x = leaf(5, 64, device=device)
    run(weight, x).sum().backward()
    assert weight.state.code.grad is None and x.grad is not None


@pytest.mark.parametrize("name", ["packed", "absmax", "code", "nested_absmax", "nested_code", "offset"])
def test_a_write_to_any_weight_tensor_before_backward_raises(name, weight, device):
    y = run(weight, leaf(5, 64, device=device))
    with torch.no_grad():
        spoil(weight.tensors()[name])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_ctx_holds_only_ints_a_dtype_and_the_guard(weight, device):
    bias = leaf(48, device=device)
    y = run(weight, leaf(5, 64, device=device), bias, guard=str)
    state = vars(y.grad_fn)
    assert state.keys() == {"spec", "guard", "bias_dtype"}
    assert all(isinstance(item, int) for item in state["spec"])
    assert len(y.grad_fn.saved_tensors) == 7  # the six tensors of the weight and the uid; never x


def test_without_a_gradient_for_x_the_weight_is_not_saved(weight, device):
    y = run(weight, torch.randn(5, 64, device=device).bfloat16(), leaf(48, device=device))
    assert len(y.grad_fn.saved_tensors) == 0


def test_a_graph_that_was_dropped_frees_the_weight(device):
    weight = Weight.random(48, 64, device, torch.bfloat16)
    alive = weakref.ref(weight.packed)
    y = run(weight, leaf(5, 64, device=device))
    storages = weight.storages()
    del weight, y
    gc.collect()
    assert alive() is None and all(storage.expired() for storage in storages.values())


def test_a_callable_guard_sees_packed_before_each_launch_and_after_unpacking(weight, device):
    log = []

    def guard(packed):
        log.append(("guard", packed.data_ptr()))

    def unpack(tensor):
        log.append(("unpack",))
        return tensor

    launches = nybble.path_counters
    x = leaf(5, 64, device=device)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), unpack):
        y = run(weight, x, guard=guard)
    assert log == [("guard", weight.packed.data_ptr())]
    before = launches()
    y.sum().backward()
    kinds = [entry[0] for entry in log[1:]]
    assert kinds == ["unpack"] * 6 + ["guard"]
    assert log[-1] != log[0], "backward must hand the unpacked tensor to the guard"
    assert launches() != before


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_a_guard_raises_stops_the_launch(direction, weight, device):
    calls = []

    def guard(packed):
        calls.append(packed)
        if direction == "forward" or len(calls) == 2:
            raise LookupError("not mine")

    nybble.reset_path_counters()
    x = leaf(5, 64, device=device)
    with pytest.raises(LookupError, match="not mine"):
        run(weight, x, guard=guard).sum().backward()
    directions = {direction for row in nybble.path_counters().values() for direction, n in row.items() if n}
    assert directions == (set() if direction == "forward" else {"forward"})
    assert x.grad is None


def test_a_uid_lets_the_owner_through_and_stops_everything_else(weight, device):
    mine, other = new_uid("layer.0.q"), new_uid("layer.1.q")
    x = leaf(5, 64, device=device)
    expected = torch.autograd.grad(run(weight, x).sum(), x)[0]
    with slot_of(weight, mine) as slot:
        assert torch.equal(torch.autograd.grad(run(weight, x, guard=mine).sum(), x)[0], expected)
        with pytest.raises(nybble.StaleWeightError, match=r"layer\.1\.q"):
            run(weight, x, guard=other)
        y = run(weight, x, guard=mine)
        slot.fill(other)
        with pytest.raises(nybble.StaleWeightError, match=r"layer\.0\.q.*layer\.1\.q"):
            y.sum().backward()
        slot.begin_fill()
        with pytest.raises(nybble.StaleWeightError, match="nothing"):
            run(weight, x, guard=mine)
    with pytest.raises(nybble.StaleWeightError, match="left the ring"):
        run(weight, x, guard=mine)


@pytest.mark.parametrize("part", ["absmax", "nested_absmax", "offset"])
def test_scales_outside_the_slot_are_as_stale_as_packed_bytes(part, weight, device):
    uid = new_uid("layer.0.k")
    with slot_of(weight, uid):
        stranger = Weight(weight.packed, weight.clone().state)
        kept = weight.state
        for name in ("absmax", "nested_absmax", "offset"):
            if name != part:
                owner = stranger.state.state2 if name == "nested_absmax" else stranger.state
                source = kept.state2 if name == "nested_absmax" else kept
                setattr(owner, name.removeprefix("nested_"), getattr(source, name.removeprefix("nested_")))
        with pytest.raises(nybble.StaleWeightError, match="left the ring"):
            run(stranger, leaf(5, 64, device=device), guard=uid)


def test_a_stale_slot_is_an_error_under_checkpoint_too(weight, device):
    mine, other = new_uid("layer.0.v"), new_uid("layer.1.v")
    x = leaf(5, 64, device=device)
    with slot_of(weight, mine) as slot:
        y = checkpoint(lambda x: run(weight, x, guard=mine), x, use_reentrant=False)
        slot.fill(other)
        with pytest.raises(nybble.StaleWeightError):
            y.sum().backward()


@pytest.mark.parametrize("mode", ["auto", "dequant"])
def test_second_derivatives_are_right(mode, weight, device):
    x = leaf(5, 64, device=device)
    grad_y = leaf(5, 48, device=device)
    grad_x = torch.autograd.grad(run(weight, x, mode=mode), x, grad_y, create_graph=True)[0]
    direction = torch.randn_like(grad_x)
    second = torch.autograd.grad(grad_x, grad_y, direction, create_graph=True)[0]
    exact = direction.double() @ dequantised(weight.packed, weight.state).t()
    assert relative_error(second, exact) < 2**-8
    # and once more, with respect to the direction
    direction.requires_grad_()
    second = torch.autograd.grad(
        torch.autograd.grad(run(weight, x, mode=mode), x, grad_y, create_graph=True)[0],
        grad_y,
        direction,
        create_graph=True,
    )[0]
    third = torch.autograd.grad(second, direction, torch.ones_like(second))[0]
    exact = torch.ones_like(second).double() @ dequantised(weight.packed, weight.state)
    assert relative_error(third, exact) < 2**-8


def test_torch_func_transforms_are_refused_clearly(weight, device):
    with pytest.raises(RuntimeError, match=r"setup_context|vmap"):
        torch.func.grad(lambda x: run(weight, x).sum())(torch.randn(5, 64, device=device).bfloat16())


def test_function_inputs_follow_the_documented_order():
    names = autograd.LinearFunction.forward.__code__.co_varnames[:12]
    assert names[1:8] == ("x", "packed", "absmax", "code", "nested_absmax", "nested_code", "offset")
