"""A streamed model computes what the resident one computes, bit for bit, in every mode of checkpointing."""

import itertools
from contextlib import nullcontext

import bitsandbytes as bnb
import pytest
import torch
from tiny_models import (
    ALL_LINEARS,
    FAMILIES,
    LAYERS,
    assert_equal,
    batches,
    checkpointed,
    linears_of,
    loss_of,
    resident_model,
    saved_elsewhere,
    step,
    streamed_model,
    with_adapters,
)

import nybble

LATE = {"poison": True, "land_at_wait": True}  # bytes land at the latest legal moment, NaN before


@pytest.fixture(scope="module")
def resident(stores):
    return with_adapters(resident_model(stores()))


@pytest.fixture(scope="module", params=[2, 3])
def streamed(request, stores):
    return with_adapters(streamed_model(stores(), window=request.param, **LATE))


@pytest.fixture(scope="module", params=[(2, "recompute"), (3, "recompute"), (2, "keep"), (3, "keep"), (2, 2)], ids=str)
def in_each_mode(request, stores):
    """A window and an activation policy."""
    window, activations = request.param
    return with_adapters(streamed_model(stores(), window=window, activations=activations, **LATE))


@pytest.fixture(scope="module")
def expected_step(resident):
    made = {}

    def get(accumulation: int, **kwargs) -> dict:
        key = (accumulation, *kwargs.items())
        if key not in made:
            made[key] = step(checkpointed(resident, **kwargs), accumulation)
        return made[key]

    return get


MODES = list(itertools.product([False, True], [True, False], [1, 2]))
_matrix: dict[tuple, int] = {}


@pytest.mark.parametrize("reentrant,early_stop,accumulation", MODES)
def test_gradients_equal_in_every_checkpoint_mode(expected_step, streamed, reentrant, early_stop, accumulation, capsys):
    kwargs = {"reentrant": reentrant} | ({} if reentrant else {"early_stop": early_stop})
    expected = expected_step(accumulation, **kwargs)
    window = nybble.memory_stats(streamed)["window"]
    before = nybble.memory_stats(streamed)
    found = step(checkpointed(streamed, **kwargs), accumulation)
    count = assert_equal(found, expected, at_least=4 * LAYERS + accumulation)
    after = nybble.memory_stats(streamed)
    assert after["visits"] - before["visits"] == 2 * LAYERS * accumulation
    assert after["refills"] > before["refills"]
    _matrix[reentrant, early_stop, accumulation, window] = count
    if len(_matrix) == 2 * len(MODES):
        with capsys.disabled():
            print("\nreentrant  early stop  accumulation  window  tensors equal")
            for (*cell, slots), compared in sorted(_matrix.items()):
                print(f"{cell[0]!s:9}  {cell[1]!s:10}  {cell[2]:12}  {slots:6}  {compared:13}")


@pytest.fixture(scope="module")
def of_family(stores):
    """The resident model of a family, and its step."""
    made = {}

    def get(family: str) -> tuple:
        if family not in made:
            model = with_adapters(resident_model(stores(family)), linears_of(family))
            made[family] = model, step(checkpointed(model))
        return made[family]

    return get


OTHERS = [name for name in FAMILIES if name != "llama"]


@pytest.mark.parametrize("activations,reentrant", [("recompute", False), ("recompute", True), ("keep", False)])
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_equal(stores, of_family, family, activations, reentrant):
    _, expected = of_family(family)
    linears = linears_of(family)
    streamed = with_adapters(streamed_model(stores(family), activations=activations, **LATE), linears)
    found = step(checkpointed(streamed, reentrant))
    assert_equal(found, expected, at_least=2 * len(linears) * LAYERS)
    assert nybble.memory_stats(streamed)["refills"] > LAYERS


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_evaluate_and_generate_equal(stores, of_family, family):
    """Gemma's windows of 8 tokens end inside the text."""
    texts, logits = [], []
    for model in (of_family(family)[0], with_adapters(streamed_model(stores(family), **LATE), linears_of(family))):
        model.eval()
        ids = batches(1, model.device)[0]
        with torch.no_grad():
            logits.append(model(input_ids=ids).logits)
            texts.append(model.generate(ids[:, :5], max_new_tokens=7, do_sample=False))
        model.train()
    assert torch.equal(*logits) and logits[0].any()
    assert torch.equal(*texts) and texts[0].shape == (2, 12)


@pytest.mark.parametrize("window", [1, 2, 4, LAYERS, 64])
def test_other_windows_and_prompt_copies_equal(stores, resident, window):
    streamed = checkpointed(with_adapters(streamed_model(stores(), window=window, chunk_bytes=4096)))
    assert_equal(step(streamed), step(checkpointed(resident)), at_least=4 * LAYERS)
    assert nybble.memory_stats(streamed)["window"] == min(window, LAYERS)


def test_evaluation_and_generation_equal(resident, streamed):
    ids = batches(1, resident.device)[0]
    for model in (resident, streamed):
        model.eval()
        model.disable_input_require_grads()
    with torch.no_grad():
        expected, found = (model(input_ids=ids).logits for model in (resident, streamed))
        assert torch.equal(found, expected)
        with torch.inference_mode():
            assert torch.equal(streamed(input_ids=ids).logits, expected)
        prompt = ids[:, :4]
        texts = [m.generate(prompt, max_new_tokens=6, do_sample=False) for m in (resident, streamed)]
    assert texts[0].shape == (2, 10)
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(streamed(input_ids=ids).logits.detach(), expected)  # with gradients on, none taken


def preference_step(model) -> dict:
    """Two live graphs, a reference pass without adapters between them and generation before the backward."""
    chosen, rejected = batches(2, model.device)
    model.zero_grad(set_to_none=True)
    good = loss_of(model, chosen)
    with torch.no_grad(), model.disable_adapter():
        reference = loss_of(model, chosen) - loss_of(model, rejected)
    bad = loss_of(model, rejected)
    model.eval()  # in training, transformers takes the cache away from a checkpointed layer
    with torch.no_grad():
        text = model.generate(chosen[:, :3], max_new_tokens=2, do_sample=False)
    model.train()
    loss = torch.nn.functional.softplus(good - bad - reference)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    return {"loss": loss.detach(), "reference": reference, "text": text, **grads}


@pytest.mark.parametrize("outside", [nullcontext, torch.autograd.graph.save_on_cpu, saved_elsewhere])
@pytest.mark.parametrize("reentrant", [False, True])
def test_two_live_graphs_with_a_reference_pass_equal(resident, in_each_mode, reentrant, outside):
    with outside():
        expected, found = (preference_step(checkpointed(model, reentrant)) for model in (resident, in_each_mode))
    assert_equal(found, expected, at_least=4 * LAYERS)


def test_two_backwards_in_either_order_and_again_equal(resident, in_each_mode):
    def run(model):
        checkpointed(model).zero_grad(set_to_none=True)
        first, second = (loss_of(model, ids) for ids in batches(2))
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

    assert_equal(run(in_each_mode), run(resident), at_least=4 * LAYERS)


@pytest.mark.parametrize("outside", [torch.autograd.graph.save_on_cpu, saved_elsewhere])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_saved_elsewhere_by_hooks_outside_equal(resident, in_each_mode, reentrant, outside):
    """Also where the backward, with its recomputations, runs under these hooks."""

    def run(model):
        with outside():
            return step(checkpointed(model, reentrant))

    assert_equal(run(in_each_mode), run(resident), at_least=4 * LAYERS)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_hooks_outside_take_no_weights_where_every_layer_has_a_slot(stores, activations):
    def run(model):
        with saved_elsewhere():
            return step(model.train())

    streamed = with_adapters(streamed_model(stores(), activations=activations, window=LAYERS, **LATE))
    assert_equal(run(streamed), run(with_adapters(resident_model(stores()))), at_least=4 * LAYERS)


@pytest.mark.parametrize("training", [True, False])
def test_kept_activations_equal_without_checkpointing(stores, training):
    def run(model):
        model.train(training)
        return step(model)

    streamed = with_adapters(streamed_model(stores(), activations="keep", **LATE), ALL_LINEARS)
    assert_equal(run(streamed), run(with_adapters(resident_model(stores()), ALL_LINEARS)), at_least=14 * LAYERS)
    stats = nybble.memory_stats(streamed)
    assert stats["visits"] >= 2 * LAYERS - 1


def test_lora_dropout_draws_the_same_numbers(stores):
    def run(model):
        torch.manual_seed(11)
        return step(checkpointed(with_adapters(model, dropout=0.1)))

    assert_equal(run(streamed_model(stores(), **LATE)), run(resident_model(stores())), at_least=4 * LAYERS)


def test_gradients_stop_where_no_adapter_is_below(stores, resident):
    """Without input gradients a backward never visits the layers below the lowest adapter."""

    def run(model):
        checkpointed(model).get_input_embeddings()._forward_hooks.clear()  # those that make its output require grad
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name and ".2." in name)
        try:
            return step(model)
        finally:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("lora_" in name)

    streamed = with_adapters(streamed_model(stores(), **LATE))
    assert_equal(run(streamed), run(resident), at_least=5)
    assert nybble.memory_stats(streamed)["visits"] == LAYERS + 3
    assert_equal(step(checkpointed(streamed)), step(checkpointed(resident)), at_least=4 * LAYERS)


def without_input_gradients(model, reentrant: bool):
    """Gradient checkpointing without the hook that makes the embeddings' output require a gradient."""
    checkpointed(model, reentrant).get_input_embeddings()._forward_hooks.clear()
    return model


def gradients(model) -> dict:
    """A loss and the gradients that there are."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, batches(1)[0])
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("layers", [(0,), (0, 3)], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_first_layer_whose_input_needs_no_gradient(resident, in_each_mode, reentrant, layers):
    """Equal, but for layers under a reentrant checkpoint: torch runs those without a graph, warns, and gives none.

    A layer that keeps is under no checkpoint, so it trains in any case.
    """

    def of_layers(name: str, chosen) -> bool:
        return any(f".layers.{index}." in name for index in chosen)

    def prepared(model, reentrant: bool):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name and of_layers(name, layers))
        return without_input_gradients(model, reentrant)

    keeps = [layer._nybble_visit.keep for layer in in_each_mode.get_base_model().model.layers]
    trained = [index for index in layers if keeps[index] or not reentrant]
    warned = pytest.warns(UserWarning, match="None of the inputs have requires_grad=True")
    refused = pytest.raises(RuntimeError, match="element 0 of tensors does not require grad")
    try:
        want = gradients(prepared(resident, False))
        want = {name: tensor for name, tensor in want.items() if of_layers(name, trained) or name == "loss"}
        prepared(in_each_mode, reentrant)
        with warned if reentrant and not all(keeps) else nullcontext(), nullcontext() if trained else refused:
            assert_equal(gradients(in_each_mode), want, at_least=4 * len(trained) + 1)
        assert sum(p.grad is not None for p in in_each_mode.parameters()) == 4 * len(trained)
    finally:
        for model in (resident, in_each_mode):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("lora_" in name)
    assert_equal(step(checkpointed(in_each_mode)), step(checkpointed(resident)), at_least=4 * LAYERS)


def test_adapters_around_a_model_loaded_in_4_bit_equal(stores, resident):
    """PEFT first, streaming afterwards: the resident weights are given up, the adapters stay."""
    wrapped = with_adapters(resident_model(stores()))
    streamed = nybble.stream(wrapped, stores(), **LATE)  # device: the model's
    assert streamed is wrapped
    assert_equal(step(checkpointed(streamed)), step(checkpointed(resident)), at_least=4 * LAYERS)
    assert nybble.memory_stats(streamed)["visits"] == 2 * LAYERS


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_autocast_recasts_as_it_does_in_patched_modules(stores, compute_dtype):
    def run(model, on=True):
        for module in model.modules():
            if isinstance(module, bnb.nn.Linear4bit):
                module.compute_dtype = compute_dtype
        with torch.autocast(stores().device.type, torch.bfloat16, enabled=on):
            return step(checkpointed(with_adapters(model, ALL_LINEARS)))

    expected = run(resident_model(stores(), patched=True))
    assert_equal(run(streamed_model(stores(), **LATE)), expected, at_least=14 * LAYERS)
    plain = run(resident_model(stores(), patched=True), on=False)
    assert not torch.equal(plain["loss 0"], expected["loss 0"])
