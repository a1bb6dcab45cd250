"""torch.compile on a patched model, and patch on a compiled one."""

import pytest
import torch

import nybble

from .models import PROJECTIONS, assert_same, batch, linears, load, qlora, step, worst_difference

LINEARS = len(PROJECTIONS)  # one layer: a compiler is slow


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_compiled_model_trains_to_the_eager_numbers(dense):
    options = {"mode": "dequant", "layers": 1, "target_modules": ["q_proj", "down_proj"]}
    eager = step(qlora(dense(), **options), batch())
    compiled = torch.compile(qlora(dense(), **options), backend="aot_eager")
    nybble.reset_path_counters()
    found = {name.removeprefix("_orig_mod."): tensor for name, tensor in step(compiled, batch()).items()}
    assert len(found) == 5
    assert worst_difference(found, eager) <= 3e-2
    counts = nybble.path_counters()["dequant"]
    assert counts["grad_input"] == LINEARS and LINEARS <= counts["forward"] <= 2 * LINEARS


def test_patching_and_unpatching_a_compiled_model_takes_effect(dense):
    """Also: a patched model compiles without a graph break."""
    model = load(dense("Qwen2"), layers=1).eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ids = batch()

    def forwards():
        nybble.reset_path_counters()
        with torch.no_grad():
            logits = compiled(input_ids=ids, use_cache=False).logits
        return nybble.path_counters()["dequant"]["forward"], logits

    none, first = forwards()
    nybble.patch(compiled, mode="dequant")
    all_of_them, second = forwards()
    nybble.unpatch(compiled)
    none_again, third = forwards()
    assert (none, all_of_them, none_again) == (0, LINEARS, 0)
    assert torch.equal(first, third) and worst_difference({"": second}, {"": first}) <= 1e-2


def test_a_compiled_module_equals_eager_and_compiles_once_per_module_at_most(dense):
    model = qlora(dense(), mode="auto")
    modules = [module for name, module in linears(model).items() if "q_proj" in name]
    seen = []

    def count(graph, inputs):
        seen.append(graph)
        return graph.forward

    function = torch.compile(lambda module, x: module(x), backend=count, fullgraph=True)
    x = torch.randn(3, 64)
    for module in modules * 2:
        assert_same({"": function(module, x)}, {"": module(x)}, at_least=1)
    assert 1 <= len(seen) <= len(modules) == 2
