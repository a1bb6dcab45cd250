"""The chunked loss: equal to the plain one up to rounding, on streamed models, without logits."""

import peft
import pytest
import torch
from tiny_models import (
    batches,
    checkpointed,
    linears_of,
    loss_of,
    resident_model,
    step,
    streamed_model,
    with_adapters,
)

import nybble
from nybble.streaming import loss as losses

LATE = {"poison": True, "land_at_wait": True}
IGNORED = losses.IGNORED


def reference(hidden, weight, labels, softcap, items):
    """Plain loops in float64: (loss, its gradient in hidden)."""
    hidden, weight = hidden.double(), weight.double()
    total, gradient = 0.0, torch.zeros_like(hidden)
    for row in range(labels.shape[0]):
        for token in range(labels.shape[1] - 1):
            target = int(labels[row, token + 1])
            if target == IGNORED:
                continue
            raw = weight @ hidden[row, token]
            logits = raw if softcap is None else softcap * torch.tanh(raw / softcap)
            chances = torch.exp(logits - logits.max()) / torch.exp(logits - logits.max()).sum()
            total -= torch.log(chances[target]).item()
            slope = chances.clone()
            slope[target] -= 1
            if softcap is not None:
                slope *= 1 - (logits / softcap) ** 2
            gradient[row, token] = weight.T @ slope
    return total / items, gradient / items


# Relative error of loss and gradient against float64. bf16: logits and slopes are rounded to 8 bits.
TOLERANCE = {torch.float32: (1e-6, 1e-5), torch.bfloat16: (5e-3, 1.5e-2)}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("items", [None, 7])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_loss_and_gradient_equal_a_float64_loop(dtype, softcap, items, chunk):
    torch.manual_seed(1)
    hidden, weight = torch.randn(2, 9, 16).to(dtype), torch.randn(50, 16).to(dtype)
    labels = torch.randint(0, 50, (2, 9))
    labels[0, 3] = labels[1, 8] = IGNORED
    hidden.requires_grad_()
    found = nybble.streaming.loss.chunked_cross_entropy(
        hidden, weight, labels, num_items_in_batch=items, softcap=softcap, chunk=chunk
    )
    (3 * found).backward()
    loss, gradient = reference(hidden.detach(), weight, labels, softcap, items or 14)
    allowed_loss, allowed_gradient = TOLERANCE[dtype]
    assert found.dtype == torch.float32
    assert abs(found.item() / loss - 1) <= allowed_loss
    assert (hidden.grad.double() / 3 - gradient).norm() <= allowed_gradient * gradient.norm()
    assert hidden.grad[0, 2].count_nonzero() == 0  # its target is ignored
    wrong = labels.roll(1, 1)  # the check sees labels that are off by one
    other = losses.chunked_cross_entropy(hidden, weight, wrong, num_items_in_batch=items, softcap=softcap, chunk=chunk)
    assert abs(other.item() / loss - 1) > allowed_loss


def close(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name].float(), tensor.float(), rtol=1e-3, atol=1e-5), name
        assert tensor.count_nonzero() > 0, name


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # with its own head, and capped with a tied one
def test_a_streamed_model_trains_as_with_the_plain_loss_and_back(stores, family):
    linears = linears_of(family)
    expected = step(checkpointed(with_adapters(resident_model(stores(family)), linears)))
    model = checkpointed(with_adapters(streamed_model(stores(family), **LATE), linears))
    plain = step(model)
    assert nybble.chunk_loss(model, tokens=5) is model
    close(step(model), expected)
    ids = batches(1, model.device)[0]
    assert model(input_ids=ids, labels=ids).logits is None
    assert model(input_ids=ids).logits.shape == (2, 12, 96)
    assert model.generate(ids[:, :3], max_new_tokens=2, do_sample=False).shape == (2, 5)
    nybble.whole_loss(model)
    back = step(model)
    assert all(torch.equal(back[name], tensor) for name, tensor in plain.items())


@pytest.mark.parametrize("family,layers", [("llama", "swiglu"), ("gemma2", "geglu")])
def test_ligers_fused_cross_entropy_trains_a_streamed_model_too(stores, family, layers):
    """Beside the plain loss and ours. Only the loss is Liger's: it sets its other kernels for every model there is."""
    liger = pytest.importorskip("liger_kernel.transformers", reason="not run: liger-kernel is not installed here")
    if stores().device.type != "cuda":
        pytest.skip("not run: Liger's kernels need a GPU")
    linears = linears_of(family)
    expected = step(checkpointed(with_adapters(resident_model(stores(family)), linears)))
    model = checkpointed(with_adapters(streamed_model(stores(family), **LATE), linears))
    apply = getattr(liger, f"apply_liger_kernel_to_{family}")
    others = {"rope": False, "rms_norm": False, layers: False}
    apply(fused_linear_cross_entropy=True, model=model.get_base_model(), **others)
    ids = batches(1, model.device)[0]
    assert model(input_ids=ids, labels=ids).logits is None  # never made
    close(step(model), expected)
    ours = nybble.chunk_loss(checkpointed(with_adapters(streamed_model(stores(family), **LATE), linears)), tokens=5)
    close(step(model), step(ours))


def test_logits_never_exist_as_a_whole(stores, monkeypatch):
    model = nybble.chunk_loss(checkpointed(with_adapters(streamed_model(stores(), **LATE))), tokens=5)
    seen = []
    original = losses.cross_entropy
    monkeypatch.setattr(losses, "cross_entropy", lambda x, *a, **k: seen.append(len(x)) or original(x, *a, **k))
    loss_of(model, batches(1)[0]).backward()
    assert seen == [5, 5, 5, 5, 4]
    assert losses.chunk_tokens(152064) == 220 and losses.chunk_tokens(1 << 40) == 1


def test_autocast_casts_as_the_plain_loss_does(stores):
    def run(model):
        with torch.autocast(model.device.type, dtype=torch.bfloat16):
            return loss_of(checkpointed(model), batches(1)[0]).item()

    plain, chunked = with_adapters(streamed_model(stores(), **LATE)), with_adapters(streamed_model(stores(), **LATE))
    assert run(nybble.chunk_loss(chunked, tokens=7)) == pytest.approx(run(plain), rel=1e-4)


def test_no_gradient_is_made_in_evaluation(stores):
    model = nybble.chunk_loss(streamed_model(stores(), **LATE)).eval()
    with torch.no_grad():
        loss = loss_of(model, batches(1)[0])
    assert torch.isfinite(loss) and loss.grad_fn is None


def test_heads_that_are_trained_or_adapted_are_refused(stores):
    model = streamed_model(stores())
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="the head is a Linear, expected lm_head to be a Linear without"):
        nybble.chunk_loss(wrapped)
    model = nybble.chunk_loss(streamed_model(stores()))
    model.lm_head.weight.requires_grad_()
    with pytest.raises(ValueError, match="the head's weight is trained, expected a frozen one"):
        loss_of(model, batches(1)[0])
    with pytest.raises(ValueError, match="tokens is 0"):
        nybble.chunk_loss(streamed_model(stores()), tokens=0)
    weight = torch.zeros(4, 2)
    with pytest.raises(ValueError, match=r"labels have shape \[1, 2\], expected \[1, 3\]"):
        losses.chunked_cross_entropy(torch.zeros(1, 3, 2), weight, torch.zeros(1, 2, dtype=torch.int64))
