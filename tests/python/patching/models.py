"""Tiny random models in 4 bit, built as a QLoRA script builds them: transformers, bitsandbytes, PEFT."""

import bitsandbytes as bnb
import peft
import torch
import transformers

import nybble

transformers.utils.logging.disable_progress_bar()

LAYERS = 2
VOCAB = 96
FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral")
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LINEARS = LAYERS * len(PROJECTIONS)
# The worst tensor of a step between two summation orders on a CPU. Weights of a tiny model are large (0.2), so bf16
# roundings grow through its layers; a wrong weight gives above 1.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
# A loss in bf16, after a few steps of AdamW too: where a gradient is near zero its sign decides the step.
LOSS_TOLERANCE = 5e-3


def write_dense(folder, family: str) -> str:
    """A float32 checkpoint of a family, weights, norms and biases all random."""
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return str(folder)


def load(path: str, compute_dtype=torch.bfloat16, device="cpu", *, layers: int = LAYERS, **config):
    """from_pretrained with a BitsAndBytesConfig: NF4, nested scales."""
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, **config}
    quantization = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=compute_dtype, **options)
    return transformers.AutoModelForCausalLM.from_pretrained(
        path,
        quantization_config=quantization,
        dtype=compute_dtype,
        device_map={"": str(device)},
        num_hidden_layers=layers,
    )


def prepared(model, reentrant: bool = False):
    model = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()  # older PEFT leaves that to the Trainer for non-reentrant checkpointing
    return model


def with_adapters(model, **config):
    """LoRA on every linear, A and B random (a zero B makes every gradient of A zero), the same for every model."""
    options = {"target_modules": PROJECTIONS, "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, **config}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**options))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in sorted(wrapped.named_parameters()):
        if "lora_" in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return wrapped


def qlora(path, *, mode=None, before=False, reentrant=False, compute_dtype=torch.bfloat16, device="cpu", **config):
    """A model ready to train: patched before or after PEFT, or not at all (mode None)."""
    layers = config.pop("layers", LAYERS)
    model = prepared(load(path, compute_dtype, device, layers=layers), reentrant)
    if mode and before:
        nybble.patch(model, mode=mode)
    model = with_adapters(model, **config)
    if mode and not before:
        nybble.patch(model, mode=mode)
    return model.train()


def linears(model) -> dict[str, bnb.nn.Linear4bit]:
    return {name: module for name, module in model.named_modules() if isinstance(module, bnb.nn.Linear4bit)}


def batch(seed: int = 1, device="cpu") -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(seed)).to(device)


def step(model, ids) -> dict[str, torch.Tensor]:
    """Loss and every gradient of one step."""
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().clone(), **gradients}


def train(model, steps: int = 2) -> dict[str, torch.Tensor]:
    """A few steps of AdamW: every loss and gradient, and the adapters at the end."""
    device = next(model.parameters()).device
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trainable.values(), lr=1e-3)
    found = {}
    for index in range(steps):
        found |= {f"{name} {index}": tensor for name, tensor in step(model, batch(index, device)).items()}
        optimizer.step()
    return found | {f"{name} trained": p.detach().clone() for name, p in trainable.items()}


def assert_same(found, expected, at_least: int) -> None:
    """Bit for bit, the same names, at least so many tensors, each finite and not zero."""
    assert found.keys() == expected.keys()
    assert len(expected) >= at_least
    for name, tensor in expected.items():
        assert torch.isfinite(tensor).all() and tensor.count_nonzero() > 0, name
        assert torch.equal(found[name], tensor), name


def worst_difference(found, expected) -> float:
    """The largest relative difference of any tensor."""
    assert found.keys() == expected.keys()
    return max(
        ((found[name].double() - tensor.double()).norm() / tensor.double().norm()).item()
        for name, tensor in expected.items()
    )


def spoil(model) -> None:
    """The control: one projection gets the bytes of another layer."""
    first, second = [module for name, module in linears(model).items() if "q_proj" in name][:2]
    first.weight.data.copy_(second.weight.data)
