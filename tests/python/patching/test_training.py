"""Patched and unpatched models train to the same numbers."""

import peft
import pytest
import torch
import torch.nn.functional as F

import nybble

from .models import (
    FAMILIES,
    LINEARS,
    LOSS_TOLERANCE,
    TOLERANCE,
    assert_same,
    batch,
    linears,
    load,
    prepared,
    qlora,
    spoil,
    step,
    train,
    with_adapters,
    worst_difference,
)

BF16, F32 = torch.bfloat16, torch.float32
RUNS = [
    ("Llama", False, BF16),
    ("Llama", True, BF16),
    ("Qwen2", False, BF16),
    ("Qwen3", True, F32),
    ("Mistral", False, F32),
]


def launches(path: str) -> dict[str, int]:
    return nybble.path_counters()[path]


def test_every_family_is_covered():
    assert {family for family, *_ in RUNS} == set(FAMILIES)


@pytest.mark.parametrize(("family", "reentrant", "dtype"), RUNS)
def test_dequant_mode_trains_to_the_bits_of_bitsandbytes(dense, family, reentrant, dtype):
    options = {"reentrant": reentrant, "compute_dtype": dtype}
    expected = train(qlora(dense(family), **options))
    for before in (True, False):
        nybble.reset_path_counters()
        found = train(qlora(dense(family), mode="dequant", before=before, **options))
        assert_same(found, expected, at_least=86)
        # Two steps: a forward, its recomputation, a gradient, each through the op.
        assert launches("dequant") == {"forward": 4 * LINEARS, "grad_input": 2 * LINEARS}


@pytest.mark.parametrize(("family", "reentrant", "dtype"), RUNS)
def test_auto_mode_agrees_within_the_stated_tolerance(dense, family, reentrant, dtype):
    options = {"reentrant": reentrant, "compute_dtype": dtype}
    expected = step(qlora(dense(family), **options), batch())
    nybble.reset_path_counters()
    model = qlora(dense(family), mode="auto", **options)
    assert worst_difference(step(model, batch()), expected) <= TOLERANCE[dtype]
    assert launches("cpu") == {"forward": 2 * LINEARS, "grad_input": LINEARS}
    assert launches("dequant") == {"forward": 0, "grad_input": 0}


def test_ten_steps_of_training_lower_the_loss_as_with_bitsandbytes(dense):
    def losses(model):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
        found = []
        for _ in range(10):
            found.append(step(model, batch())["loss"].item())
            optimizer.step()
        return found

    expected = losses(qlora(dense()))
    assert losses(qlora(dense(), mode="dequant")) == expected
    found = losses(qlora(dense(), mode="auto"))
    assert found == pytest.approx(expected, rel=3e-2)
    assert found[-1] < 0.8 * found[0]


@pytest.mark.parametrize("mode", ["dequant", "auto"])
def test_a_wrong_weight_is_seen(dense, mode):
    expected = step(qlora(dense()), batch())
    model = qlora(dense(), mode=mode)
    spoil(model)
    found = step(model, batch())
    assert worst_difference(found, expected) > 3 * TOLERANCE[BF16]
    with pytest.raises(AssertionError):
        assert_same(found, expected, at_least=1)


def dense_forward(self, x):
    """What a module computes, from a dense weight and torch's own linear."""
    weight = nybble.dequantize_4bit(self.weight, self.weight.quant_state).to(self.compute_dtype)
    bias = None if self.bias is None else self.bias.to(self.compute_dtype)
    return F.linear(x.to(self.compute_dtype), weight, bias).to(x.dtype)


def reversed_forward(self, x):
    """The same, summed in reverse: over K forward, over N in backward. Without bias."""
    weight = nybble.dequantize_4bit(self.weight, self.weight.quant_state).to(self.compute_dtype)
    return F.linear(x.to(self.compute_dtype).flip(-1), weight.flip(0, 1)).flip(-1).to(x.dtype)


def with_dense_weights(model, forward=dense_forward):
    for module in linears(model).values():
        module.__class__ = type("Dense", (type(module),), {"forward": forward})
    return model


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_trainable_bias_gets_its_gradient_and_stays_in_its_dtype(dense, device, dtype):
    def model(patched: bool):
        made = prepared(load(dense("Qwen2"), dtype, device))
        made = with_adapters(made, bias="all").train()
        if patched:
            nybble.patch(made, mode="dequant")
            return made
        return with_dense_weights(made)

    patched = model(True)
    found, expected = step(patched, batch(device=device)), step(model(False), batch(device=device))
    biases = [name for name in expected if name.endswith("q_proj.base_layer.bias")]
    assert len(biases) == 2
    # The sums of the bias gradient run in another order than in torch's own backward.
    assert worst_difference(found, expected) <= (1e-6 if dtype == F32 else 1e-2)
    for name in biases:
        assert found[name].count_nonzero() == found[name].numel()
        assert patched.get_parameter(name).dtype == F32 and found[name].dtype == F32


def test_dequant_mode_equals_a_dense_multiply_on_every_device(dense, device):
    expected = step(with_dense_weights(qlora(dense(), device=device)), batch(device=device))
    patched = qlora(dense(), mode="dequant", device=device)
    assert_same(step(patched, batch(device=device)), expected, at_least=29)
    spoil(patched)
    assert worst_difference(step(patched, batch(device=device)), expected) > 1e-2


def test_auto_mode_is_as_near_to_a_dense_multiply_as_another_order_of_its_sums(dense, device):
    """Roundings grow from layer to layer, by how much depends on the device: measured as the dense multiply in reverse.
    On a CPU, where few sums round otherwise, the stated tolerance is the larger of the two.
    """
    ids = [batch(seed, device) for seed in (1, 2, 3)]

    def steps(model):
        return [step(model, each) for each in ids]

    def worst(found, expected):
        return max(worst_difference(*pair) for pair in zip(found, expected, strict=True))

    def losses(found):
        return [{"loss": each["loss"]} for each in found]

    reference = steps(with_dense_weights(qlora(dense(), device=device)))
    noise = worst(steps(with_dense_weights(qlora(dense(), device=device), reversed_forward)), reference)
    allowed = max(TOLERANCE[BF16], 2 * noise)
    assert 0 < noise < 0.15
    model = qlora(dense(), mode="auto", device=device)
    found = steps(model)
    assert worst(found, reference) <= allowed
    # bitsandbytes' own kernels round their sums too; how far its gradients are from dense ones is theirs.
    bitsandbytes = steps(qlora(dense(), device=device))
    assert worst(losses(found), losses(bitsandbytes)) <= LOSS_TOLERANCE
    assert worst(found, bitsandbytes) <= max(allowed, 2 * worst(bitsandbytes, reference))
    spoil(model)
    assert worst(losses(steps(model)), losses(bitsandbytes)) > LOSS_TOLERANCE
    assert worst(steps(model), reference) > 3 * allowed


def test_evaluation_and_generation_equal_bitsandbytes(dense):
    ids = batch()
    models = [qlora(dense(), mode=mode).eval() for mode in (None, "dequant")]
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            logits = [model(input_ids=ids).logits for model in models]
        assert torch.equal(*logits) and logits[0].count_nonzero() > 0
    written = [model.generate(input_ids=ids, max_new_tokens=4, do_sample=False) for model in models]
    assert torch.equal(*written) and written[0].shape == (2, 16)


def test_disabled_adapters_leave_the_base_alone(dense):
    ids = batch()
    models = [qlora(dense(), mode=mode) for mode in (None, "dequant")]
    with torch.no_grad():
        without = []
        for model in models:
            with model.disable_adapter():
                without.append(model(input_ids=ids).logits)
        assert torch.equal(*without)
        assert not torch.equal(without[0], models[1](input_ids=ids).logits)


@pytest.mark.parametrize("compute_dtype", [BF16, F32])
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_recasts_as_it_does_for_bitsandbytes(dense, autocast, compute_dtype):
    results = []
    for mode in (None, "dequant"):
        model = qlora(dense("Qwen2"), mode=mode, compute_dtype=compute_dtype)
        with torch.autocast("cpu", autocast):
            results.append(step(model, batch()))
    assert_same(results[1], results[0], at_least=29)


def test_peft_picks_the_same_lora_class_before_and_after(dense):
    for before in (True, False):
        model = qlora(dense(), mode="auto", before=before)
        layers = [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
        assert len(layers) == LINEARS
        assert {type(layer) for layer in layers} == {peft.tuners.lora.bnb.Linear4bit}
