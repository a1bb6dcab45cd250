"""The swap of docs/plug-in.md, inside a runtime that recycles its buffers: dequantise + linear, and nybble's op."""

import pathlib
import re

import bitsandbytes as bnb
import pytest
import torch
import torch.nn.functional as F

import nybble

from .runtime import LAYERS, WIDTH, Runtime

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "plug-in.md"
MULTIPLIES = 2 * LAYERS
TOLERANCE = 0.1  # of the worst tensor, bf16; a gradient from another layer's weight is off by more than its norm
TENSORS = 1 + 2 * LAYERS  # the output and both adapter matrices of every layer


def swapped():
    """The forward that the page shows, at most 15 lines of it."""
    block = re.search(r"```python\n(import nybble\n.*?)```", PAGE.read_text(), re.S).group(1)
    body = block[block.index("def forward") :].strip().splitlines()
    assert len(body) <= 15
    scope = {}
    exec(block, scope)
    return scope["forward"]


def dense_site(self, x):
    dtype, x = x.dtype, x.to(self.compute_dtype)
    bias = None if self.bias is None else self.bias.to(x.dtype)
    weight = nybble.dequantize_4bit(self.weight, self.weight.quant_state).to(x.dtype)
    return F.linear(x, weight, bias).to(dtype)


def upstream_site(self, x):
    """bitsandbytes' own multiply, which keeps the weight where checkpointing does not see it."""
    dtype, x = x.dtype, x.to(self.compute_dtype)
    bias = None if self.bias is None else self.bias.to(x.dtype)
    return bnb.matmul_4bit(x, self.weight.t(), quant_state=self.weight.quant_state, bias=bias).to(dtype)


def inputs(device, needs_gradient=True):
    """[2, 7, 64], its strides those of a transposed tensor."""
    x = torch.randn(7, 2, WIDTH, generator=torch.Generator().manual_seed(4)).to(device).transpose(0, 1)
    assert not x.is_contiguous()
    return x.requires_grad_(needs_gradient)


def assert_same(found, expected, count):
    assert found.keys() == expected.keys() and len(found) == count
    for name, tensor in expected.items():
        assert torch.isfinite(tensor).all() and tensor.count_nonzero() > 0, name
        assert torch.equal(found[name], tensor), name


def worst(found, expected) -> float:
    return max(((found[name] - t).float().norm() / t.float().norm()).item() for name, t in expected.items())


@pytest.mark.parametrize("guard", ["uid", "callable"])
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_dequant_mode_gives_the_bits_of_the_old_site(device, needs_gradient, guard):
    expected = Runtime(device, dense_site).step(inputs(device, needs_gradient))
    runtime = Runtime(device, swapped(), guard=guard)
    nybble.reset_path_counters()
    found = runtime.step(inputs(device, needs_gradient))
    assert_same(found, expected, TENSORS + needs_gradient)
    assert runtime.loads == 2 * LAYERS
    # Without a gradient for x the first layer's first multiply has no gradient to give.
    reads = MULTIPLIES - (not needs_gradient)
    assert nybble.path_counters()["dequant"] == {"forward": 2 * MULTIPLIES, "grad_input": reads}
    if guard == "callable":
        assert len(runtime.checked) == 2 * MULTIPLIES + reads


def test_auto_mode_agrees_with_the_old_site(device):
    expected = Runtime(device, dense_site).step(inputs(device))
    nybble.reset_path_counters()
    found = Runtime(device, swapped(), mode="auto").step(inputs(device))
    assert worst(found, expected) <= TOLERANCE
    counts = nybble.path_counters()
    assert counts["dequant"] == {"forward": 0, "grad_input": 0}
    assert sum(path["grad_input"] for path in counts.values()) == MULTIPLIES


def test_the_control_an_op_that_hides_its_weight_is_seen(device):
    expected = Runtime(device, dense_site).step(inputs(device))
    found = Runtime(device, upstream_site).step(inputs(device))
    assert worst({"y": found["y"]}, {"y": expected["y"]}) <= TOLERANCE
    assert worst(found, expected) > 5 * TOLERANCE


@pytest.mark.parametrize("guard", ["uid", "callable"])
def test_a_slot_that_was_not_filled_again_is_an_error(device, guard):
    runtime = Runtime(device, swapped(), guard=guard, lazy=True)
    error = nybble.StaleWeightError if guard == "uid" else RuntimeError
    with pytest.raises(error, match="layer"):
        runtime.step(inputs(device))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_with_adapters_off(device, context):
    results = []
    for site in (dense_site, swapped()):
        runtime = Runtime(device, site)
        with context():
            on = runtime.forward(inputs(device, False), checkpointed=False)
            for layer in runtime.layers:
                layer.adapters = False
            results.append(runtime.forward(inputs(device, False), checkpointed=False))
        assert not torch.equal(on, results[-1])
    assert torch.equal(*results)


def test_a_reference_pass_between_forward_and_backward_changes_nothing(device):
    expected = Runtime(device, dense_site).step(inputs(device))
    runtime = Runtime(device, swapped())
    x = inputs(device)
    y = runtime.forward(x)
    with torch.no_grad():
        runtime.forward(x.detach(), checkpointed=False)
    y.float().pow(2).mean().backward()
    assert torch.equal(x.grad, expected["x"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(device, dtype):
    """The module's compute dtype decides for nybble's op. Where autocast asks for the same one, so it does before."""
    results = []
    for site in (dense_site, swapped()):
        runtime = Runtime(device, site)
        for layer in runtime.layers:
            layer.first.compute_dtype = layer.second.compute_dtype = dtype
        with torch.autocast(device.type, dtype):
            results.append(runtime.step(inputs(device)))
    assert_same(results[1], results[0], TENSORS + 1)
