"""Tiny random models of the supported families, their stores, and resident models that multiply with nybble too."""

import bitsandbytes as bnb
import peft
import torch
import transformers

import nybble

transformers.utils.logging.disable_progress_bar()

LAYERS = 5
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
    "gemma3_text": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
}
# What a family's config has beyond the common fields. Windows shorter than the batches, caps that bite.
EXTRA = {
    "gemma2": dict(sliding_window=8, final_logit_softcapping=4.0, attn_logit_softcapping=3.0, query_pre_attn_scalar=16),
    "gemma3_text": dict(sliding_window=8, query_pre_attn_scalar=16),
}
FUSED_LINEARS = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
ALL_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Store(str):
    """A store's folder, and the device that the models made from it live on."""

    device: torch.device


class ResidentLinear4bit(bnb.nn.Linear4bit):
    """bitsandbytes' module with nybble's multiply: the reference has the same numerics, weights where they belong."""

    def forward(self, x):
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nybble.linear(x.to(self.compute_dtype), self.weight, self.weight.quant_state, bias).to(x.dtype)


# Some of the ways in which checkpoints differ. Default: float32, nested scales.
BFLOAT16 = ("mistral", "gemma3_text")
PLAIN_SCALES = ("qwen2",)


def write_store(folder, family: str) -> str:
    """A prequantised checkpoint in NF4, its head untied for Llama and tied for the others."""
    dtype = torch.bfloat16 if family in BFLOAT16 else torch.float32
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(7)
    config = config_class(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        **({} if family == "phi3" else {"head_dim": 16}),
        **EXTRA.get(family, {}),
        max_position_embeddings=64,
        tie_word_embeddings=family != "llama",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():  # larger than the usual start values, biases and norms too
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder / "dense")
    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=family not in PLAIN_SCALES,
        bnb_4bit_compute_dtype=dtype,
    )
    quantised = model_class.from_pretrained(folder / "dense", quantization_config=quantization, dtype=dtype)
    quantised.save_pretrained(folder / "store")
    return str(folder / "store")


def linears_of(family: str) -> list[str]:
    return FUSED_LINEARS if family == "phi3" else ALL_LINEARS


def streamed_model(store: Store, **options) -> torch.nn.Module:
    return nybble.stream(None, store, device=store.device, **options)


def resident_model(store: Store, patched: bool = False) -> torch.nn.Module:
    """On the store's device, its rotary tables made on the CPU, as those of the streamed model. patched: by
    nybble.patch, instead of the plain class above.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(store, device_map={"": "cpu"})
    torch.nn.Module.to(model, store.device)
    if patched:
        nybble.patch(model)
    for module in model.modules():
        if type(module) is bnb.nn.Linear4bit:
            module.__class__ = ResidentLinear4bit
    return model


def with_adapters(model, targets=("q_proj", "v_proj"), dropout: float = 0.0):
    """LoRA with A and B random (a zero B makes every gradient of A vacuous), the same for every model."""
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=list(targets), lora_dropout=dropout, task_type="CAUSAL_LM"
    )
    wrapped = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in sorted(wrapped.named_parameters()):
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.device)
    return wrapped


def batches(count: int, device="cpu"):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 96, (2, 12), generator=generator).to(device) for _ in range(count)]


def checkpointed(model, reentrant: bool = False, **kwargs):
    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant, **kwargs})
    return model


def loss_of(model, ids):
    ids = ids.to(model.device)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def step(model, count: int = 1) -> dict[str, torch.Tensor]:
    """One step of `count` accumulated batches: losses and every adapter's gradient."""
    model.zero_grad(set_to_none=True)
    results = {}
    for index, ids in enumerate(batches(count)):
        loss = loss_of(model, ids)
        loss.backward()
        results[f"loss {index}"] = loss.detach().clone()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            results[name] = parameter.grad.clone()
    return results


def saved_elsewhere():
    """What autograd saves comes back in another place, as with save_on_cpu for a GPU's tensors."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor)


def assert_equal(found: dict, expected: dict, at_least: int) -> int:
    """Bit for bit, the same names, at least so many tensors, none all zero. Returns how many were compared."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert tensor.count_nonzero() > 0, name
        assert torch.isfinite(tensor).all(), name
    assert len(expected) >= at_least
    return len(expected)
