import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import nybble
from nybble import _ops
from nybble.gate.multiply import moved, random_operand, random_weight
from nybble.quant_state import nested_table, weight_args
from nybble.testing.weights import Weight

from .conftest import has_gpu
from .reference import DTYPES, quantised
from .slots import new_uid, slot_of

LAYERS = 32


def op_arguments(device, *, nested, mode=0, bias=True):
    """Arguments of linear_4bit and of its gradient."""
    packed, state = quantised(48, 80, nested=nested, device=device)
    args = weight_args(packed, state)
    spec = (48, 80, 64, args.quant_type, args.state_dtype, args.nested_dtype, mode, False)
    x = torch.randn(2, 5, 80, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad_y = torch.randn(2, 5, 48, device=device, dtype=torch.bfloat16, requires_grad=True)
    b = torch.randn(48, device=device, requires_grad=True) if bias else None
    return (x, *args.tensors, b, None, *spec), (grad_y, *args.tensors, None, *spec)


@pytest.mark.parametrize(("nested", "mode", "bias"), [(True, 0, True), (False, 0, False), (True, 2, True)])
def test_opcheck_passes_for_the_multiply(nested, mode, bias, device):
    forward, backward = op_arguments(device, nested=nested, mode=mode, bias=bias)
    torch.library.opcheck(_ops.linear_4bit, forward)
    torch.library.opcheck(_ops.linear_4bit_grad_input, backward)


def test_opcheck_passes_for_the_codec(device):
    dense = torch.randn(48, 80, device=device).bfloat16()
    packed, state = quantised(48, 80, device=device)
    tensors = weight_args(packed, state).tensors
    torch.library.opcheck(_ops.dequantize_4bit, (*tensors, None, 48, 80, 64, 0, 0, 2))
    torch.library.opcheck(_ops.quantize_4bit, (dense, 64, 0))
    scales = torch.rand(600, device=device)
    torch.library.opcheck(_ops.absmax_mean, (scales,))
    torch.library.opcheck(_ops.quantize_scales, (scales, torch.tensor(0.5, device=device), nested_table(device)))


def test_registered_autograd_gives_the_bits_of_the_eager_front(device):
    (x, *rest), _ = op_arguments(device, nested=True)
    bias = rest[6]
    y = _ops.linear_4bit(x, *rest)
    grad_y = torch.randn_like(y)
    packed, state = rest[0], nybble.QuantState(rest[1], (48, 80), rest[2], 64, "nf4", torch.bfloat16, rest[5])
    state.state2 = nybble.QuantState(rest[3], None, rest[4], 256, None, torch.float32)
    eager = nybble.linear(x, packed, state, bias)
    assert torch.equal(y, eager)
    gradients = torch.autograd.grad(y, (x, bias), grad_y)
    expected = torch.autograd.grad(eager, (x, bias), grad_y)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_a_direct_call_raises_the_library_s_text():
    """As RuntimeError from torch 2.15 on; the functions of nybble raise the exact types with every torch."""
    (x, *rest), (grad_y, *weight) = op_arguments("cpu", nested=True)
    with pytest.raises((ValueError, RuntimeError), match="x has shape"):
        _ops.linear_4bit(x.detach()[..., :79], *rest)
    with pytest.raises(ValueError, match="x has shape"):
        nybble.linear(x.detach()[..., :79], *quantised(48, 80))
    with pytest.raises(RuntimeError, match="grad_y is float64, expected float32"):
        _ops.linear_4bit_grad_input(grad_y.detach().double(), *weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["auto", "dequant"])
def test_autocast_leaves_the_dtype_of_x_alone(dtype, mode, device):
    packed, state = quantised(48, 80, device=device)
    x = torch.randn(3, 80, device=device).to(dtype).requires_grad_()
    expected = nybble.linear(x, packed, state, mode=mode)
    grad = torch.autograd.grad(expected.sum(), x)[0]
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = nybble.linear(x, packed, state, mode=mode)
        assert y.dtype == dtype and torch.equal(y, expected)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], grad)


class Layer(torch.nn.Module):
    """A residual 4-bit layer, its weight in a slot of its own. Arithmetic that a compiler cannot reorder."""

    def __init__(self, index, device):
        super().__init__()
        packed, state = quantised(64, 64, dtype=torch.float32, device=device)
        self.weight = Weight(packed, state).clone()
        self.uid = new_uid(f"layer.{index}")
        self.bias = torch.nn.Parameter(torch.randn(64, device=device) * 0.1)

    def forward(self, x):
        state = self.weight.state
        y = nybble.nf4_linear(
            x,
            self.weight.packed,
            state.absmax,
            (64, 64),
            code=state.code,
            nested_absmax=state.state2.absmax,
            nested_code=state.state2.code,
            offset=state.offset,
            bias=self.bias,
            guard=self.uid,
        )
        return y * 0.125 + x


@pytest.fixture
def stack(device):
    layers = torch.nn.ModuleList([Layer(i, device) for i in range(LAYERS)])
    slots = [slot_of(layer.weight, layer.uid) for layer in layers]
    for slot in slots:
        slot.__enter__()
    yield layers
    for slot in slots:
        slot.__exit__(None, None, None)


def run_stack(layers, model, device):
    """y, grad_x, bias gradients and launch counts of one step."""
    torch.manual_seed(1)
    x = torch.randn(2, 64, device=device, requires_grad=True)
    layers.zero_grad(set_to_none=True)
    nybble.reset_path_counters()
    y = model(x)
    y.sum().backward()
    counts = nybble.path_counters()
    forwards = sum(row["forward"] for row in counts.values())
    grads = sum(row["grad_input"] for row in counts.values())
    return [y.detach(), x.grad, *[layer.bias.grad for layer in layers]], forwards, grads


@pytest.mark.parametrize(("backend", "whole"), [("aot_eager", True), ("inductor", False)])
def test_compiled_checkpointed_layers_with_distinct_uids_share_graphs_and_equal_eager(backend, whole, stack, device):
    def model(x, layers=stack):
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    expected, forwards, grads = run_stack(stack, model, device)
    assert (forwards, grads) == (2 * LAYERS, LAYERS), "eager: forward, recomputation, gradient"
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    if whole:
        compiled = torch.compile(model, fullgraph=True, backend=counter)
    else:
        layers = [torch.compile(layer, fullgraph=True, backend=counter) for layer in stack]
        compiled = lambda x: model(x, layers)  # noqa: E731
    found, forwards, grads = run_stack(stack, compiled, device)
    assert counter.frame_count <= 2
    assert grads == LAYERS and LAYERS <= forwards <= 2 * LAYERS  # a compiler may drop a recomputation
    assert len(found) == len(expected) > 2
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    torch._dynamo.reset()


def run_chain(model, x, grad_y):
    """y and grad_x of one step, and the launches of each path."""
    x = x.clone().requires_grad_()
    before = nybble.path_counters()
    y = model(x)
    y.backward(grad_y)
    return (y.detach(), x.grad), moved(before, nybble.path_counters())


@pytest.mark.skipif(not has_gpu(), reason="no GPU, or nybble was built without CUDA")
@pytest.mark.parametrize(("m", "path"), [(16, "small_m"), (128, "hopper")])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_compiled_fused_multiplies_have_the_bits_of_eager_ones(dtype, backend, m, path):
    device, n = torch.device("cuda"), 1024
    first, second = (random_weight(n, n, device, seed, dtype) for seed in range(2))
    bias, x, grad_y = (random_operand(rows, n, device, seed, dtype) for rows, seed in ((1, 2), (m, 3), (m, 4)))

    def chain(x):
        return nybble.linear(nybble.linear(x, first.packed, first.state, bias[0]), second.packed, second.state)

    expected, launches = run_chain(chain, x, grad_y)
    torch._dynamo.reset()
    compiled = torch.compile(chain, fullgraph=True, backend=backend)
    for _ in range(2):  # compiling, then compiled
        found, compiled_launches = run_chain(compiled, x, grad_y)
        assert compiled_launches == launches
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    if torch.cuda.get_device_capability() == (9, 0):
        assert launches == {f"{path}.forward": 2, f"{path}.grad_input": 2}
    first.packed.view(-1)[7] ^= 0x40  # the control
    found, _ = run_chain(compiled, x, grad_y)
    assert not any(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    torch._dynamo.reset()


def test_a_compiled_read_of_a_stale_slot_raises(stack, device):
    torch._dynamo.reset()
    layer = stack[0]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 64, device=device, requires_grad=True)
    compiled(x).sum().backward()
    layer.uid.fill_(int(stack[1].uid))  # another weight's name
    with pytest.raises(RuntimeError, match=r"layer\.1"):
        compiled(x)
    torch._dynamo.reset()


def test_a_callable_guard_is_refused_under_compile(device):
    packed, state = quantised(48, 64, nested=False, device=device)

    def multiply(x):
        return nybble.nf4_linear(x, packed, state.absmax, (48, 64), guard=lambda packed: None)

    x = torch.randn(3, 64, device=device).bfloat16()
    assert multiply(x).shape == (3, 48)
    with pytest.raises(Exception, match="a callable guard cannot be compiled"):
        torch.compile(multiply, fullgraph=True, backend="eager")(x)
    torch._dynamo.reset()
