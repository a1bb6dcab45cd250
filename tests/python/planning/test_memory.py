"""What a plan counts, against figures worked out by hand for a Llama of 4 layers: hidden 256, MLP 512, 4 heads and 2
key-value heads of 64, vocabulary 8192, with 1024 tokens, so that every piece is a multiple of 512 bytes.
"""

import itertools

import pytest
import torch

from nybble.planning import memory, source, trace

from .conftest import ABSENT

T, H, F, KV, V, L = 1024, 256, 512, 128, 8192, 4
ROTARY = 2 * 2 * 64 * T  # cos and sin, bf16
SCALAR = 512  # what 4 bytes take
FINAL_NORM = 4 * H * T + 4 * T  # its input in float32, and a reciprocal root a token


def plan(folder, window=2, optimiser="adamw", resident=False, **step):
    found = source.read(folder)
    step = trace.Step(T, rank=8, **step)
    traced = trace.record(found, step)
    return memory.simulate(
        found,
        traced,
        window=window,
        tokens=T,
        optimiser=optimiser,
        element=step.adapter_dtype.itemsize,
        holds_gradients=step.holds_gradients,
        resident=resident,
    )


def packed(n: int, k: int) -> int:
    """Codes, 8-bit scales, float32 nested scales, offset; each from a multiple of 256 bytes on."""
    blocks = n * k // 64
    return sum(-(-size // 256) * 256 for size in (n * k // 2, blocks, 4 * -(-blocks // 256), 4))


PROJECTIONS = [(H, H), (KV, H), (KV, H), (H, H), (F, H), (F, H), (H, F)]
LAYER = -(-sum(packed(n, k) for n, k in PROJECTIONS) // 4096) * 4096
ADAPTERS = 8 * sum(n + k for n, k in PROJECTIONS) * L  # elements


def test_what_stays_for_the_whole_run(folder):
    lines = plan(folder()).lines
    assert lines["slots"] == 2 * LAYER
    assert lines["embedding"] == lines["head"] == 2 * V * H
    assert lines["norms and biases"] == (2 * L + 1) * 2 * H
    assert lines["adapters"] == 2 * ADAPTERS
    assert lines["optimiser"] == 2 * 2 * ADAPTERS + 14 * L * SCALAR  # two states, a step count for each of 14 tensors
    assert lines["token ids"] == 8 * T
    assert lines["workspaces of cuBLAS"] == 2 * memory.CUBLAS_WORKSPACE
    assert plan(folder(), window=3).lines["slots"] == 3 * LAYER
    assert plan(folder(), window=9).lines["slots"] == L * LAYER
    assert plan(folder(), resident=True).lines["packed base"] == L * LAYER
    tied = plan(folder(tie_word_embeddings=True)).lines
    assert tied["embedding, which is the head too"] == 2 * V * H and "head" not in tied


def test_the_whole_loss_holds_twelve_bytes_a_logit_at_its_peak(folder):
    found = plan(folder())
    # log-probabilities and two gradients in float32; the loss and a count
    assert found.lines["logits and loss"] == 12 * V * T + FINAL_NORM + 2 * SCALAR
    assert found.lines["gradients"] == found.lines["working memory"] == 0  # the layers' backward has not begun
    assert found.allocated == sum(found.lines.values())


def test_recomputing_keeps_the_layers_inputs(folder):
    assert plan(folder()).lines["kept activations"] == L * 2 * H * T + ROTARY + 8 * T  # and the positions


def test_keeping_holds_what_autograd_saves_in_each_layer(folder):
    norm = 4 * H + 4 + 2 * H  # float32 input, root, result
    attention = 2 * H + 2 * KV + 2 * KV + 2 * H + 4 * 4  # q, k, v, result, a sum a head
    mlp = 4 * 2 * F  # gate, its silu, up, their product
    adapters = 7 * 2 * 8  # what B is multiplied with
    layer = (norm + attention + norm + mlp + adapters) * T
    embedded = 2 * H * T
    assert plan(folder(), keep=L).lines["kept activations"] == L * layer + embedded + ROTARY
    some = plan(folder(), keep=1).lines["kept activations"]
    assert some == layer + (L - 1) * 2 * H * T + ROTARY + 8 * T  # the last layer's input is kept in float32 only


def test_the_chunked_loss_takes_one_chunk_and_the_gradient_of_the_hidden_states(folder, monkeypatch):
    monkeypatch.setattr("nybble.streaming.loss.CHUNK_BYTES", 4 * V * 128)
    whole, chunked = plan(folder()), plan(folder(), chunked_loss=True)
    chunk = 10 * V * 128  # float32 logits and slope, the slope in bf16
    assert chunk < chunked.lines["logits and loss"] < chunk + 3 * 2 * H * T + FINAL_NORM + 16 * T
    assert chunked.allocated < whole.allocated - 11 * V * T + 10 * V * 128


def test_adapters_in_float32_and_optimisers(folder):
    lines = plan(folder(), adapter_dtype=torch.float32).lines
    assert lines["adapters"] == 4 * ADAPTERS and lines["optimiser"] == 8 * ADAPTERS + 14 * L * SCALAR
    assert plan(folder(), optimiser="sgd").lines["optimiser"] == 0
    # 8-bit states, with two scales of 64 bytes, from 4096 elements on: B of gate and up, A of down
    large = 3 * L
    small = ADAPTERS - large * 4096
    assert plan(folder(), optimiser="adamw8bit").lines["optimiser"] == 8 * small + large * 2 * (4096 + SCALAR)


def test_gradients_of_an_earlier_batch_are_there_at_the_peak(folder):
    assert plan(folder(), holds_gradients=True).lines["gradients"] == 2 * ADAPTERS


def test_targets_have_the_adapters_and_others_are_refused(folder):
    lines = plan(folder(), targets=("q_proj", "v_proj")).lines
    assert lines["adapters"] == 2 * 8 * (2 * H + KV + H) * L
    with pytest.raises(ValueError, match="targets has qkv_proj, expected some of down_proj, gate_proj"):
        plan(folder(), targets=("qkv_proj",))


FAMILIES = {
    "mistral": dict(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=None),
    "qwen2": dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"]),
    "qwen3": dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"]),
    "gemma2": dict(model_type="gemma2", architectures=["Gemma2ForCausalLM"]),
    "gemma3_text": dict(model_type="gemma3_text", architectures=["Gemma3ForCausalLM"]),
    "phi3": dict(model_type="phi3", architectures=["Phi3ForCausalLM"], pad_token_id=0, head_dim=ABSENT),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_traced(folder, family):
    found = plan(folder(**FAMILIES[family]), keep=2)
    assert found.lines["logits and loss"] >= 12 * V * T
    assert found.lines["kept activations"] > 2 * H * T * L
    assert found.reserved >= found.allocated > found.lines["logits and loss"]


def test_attention_that_caps_its_scores_holds_them(folder):
    with_scores, without = (
        plan(folder(**FAMILIES["gemma2"], attn_logit_softcapping=cap), keep=L).lines["kept activations"]
        for cap in (50.0, None)
    )
    scores = 4 * T * T  # of all heads
    assert with_scores - without > L * scores * (2 + 2 + 2)  # tanh's result, the sum's and the softmax's in bf16


def test_a_workspace_of_the_multiply_is_counted_where_the_card_wants_one(folder):
    found = source.read(folder(vocab_size=512))
    step = trace.Step(T, rank=8)
    plain, more = (
        memory.simulate(found, trace.record(found, step, lambda *_, size=size: size), window=2, tokens=T)
        for size in (0, 64 << 20)
    )
    assert more.allocated - plain.allocated > 60 << 20


UNFOLDED = {
    "recompute": {},
    "keep": {"keep": 12},
    "both": {"keep": 6, "chunked_loss": True},
    "few keep": {"keep": 3, "reentrant": True},
    "accumulated": {"holds_gradients": True, "keep": 8},
}


def without_order_of_frees(events):
    """Frees with no allocation between them, sorted: torch 2.15 drops the last tensors of a step in another order."""
    runs = itertools.groupby(events, key=lambda event: event[1] < 0)
    return [event for freed, run in runs for event in (sorted(run) if freed else run)]


@pytest.mark.parametrize("case", UNFOLDED)
def test_a_trace_of_few_layers_unfolds_to_that_of_all(folder, case):
    found = source.read(folder(num_hidden_layers=12))
    step = trace.Step(T, rank=8, **UNFOLDED[case])
    whole, _ = trace._record(found, step, lambda *_: 0)
    unfolded = trace.record(found, step)
    assert without_order_of_frees(unfolded.events) == without_order_of_frees(whole.events)
    assert unfolded.kinds == whole.kinds
    assert (unfolded.after, unfolded.multiplies) == (whole.after, whole.multiplies)
    assert unfolded.resident == whole.resident and unfolded.adapters == whole.adapters
    played = [memory.simulate(found, traced, window=2, tokens=T) for traced in (unfolded, whole)]
    assert played[0] == played[1]  # so the order above changes neither what is allocated nor what is reserved


def test_every_type_of_layer_is_among_the_first(folder):
    found = source.read(folder(**FAMILIES["gemma3_text"], num_hidden_layers=12))
    assert found.config.layer_types.index("full_attention") == 5
    assert set(found.first_layers(5).config.layer_types) == {"full_attention", "sliding_attention"}
