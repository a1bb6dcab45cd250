"""A model without base weights in memory: built on meta from its config, then given its resident tensors."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from .store import CheckpointStore

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")
RESIDENT_DTYPES = ("F32", "BF16", "F16")


def base_model_of(model: torch.nn.Module) -> torch.nn.Module:
    """The transformers model, below PEFT's wrapper where there is one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def require_supported(config) -> None:
    found = getattr(config, "model_type", None)
    if found not in MODEL_TYPES:
        raise ValueError(f"streaming does not know model_type {found!r}, expected one of {', '.join(MODEL_TYPES)}")


def build(config, store: CheckpointStore) -> torch.nn.Module:
    """The model of a config with every parameter and buffer on meta, in eval mode as from_pretrained leaves it."""
    if config is None:
        config = AutoConfig.from_pretrained(store.path)
        store.require_layers(config.num_hidden_layers)
    require_supported(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if (store.path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(store.path)
    return model.eval()


def store_name(name: str) -> str:
    """A parameter's name in the store: without the levels that PEFT adds."""
    return name.replace(".base_layer.", ".")


def fill_resident(model: torch.nn.Module, store: CheckpointStore, device: torch.device, streamed: set[str]) -> None:
    """Gives every parameter that is on meta its tensor from the store, in the store's dtype, rebuilds the rotary
    tables, ties the head. streamed: modules whose weight comes through slots, left alone. ValueError names what the
    store lacks or what is left on meta; the model then has no streamed layer yet.
    """
    model.tie_weights()
    wanted = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.is_meta and store_name(name).removesuffix(".weight") not in streamed
    }
    for name, parameter in wanted.items():  # all, before the first is changed
        if "lora_" in name or store_name(name) not in store:
            raise ValueError(
                f"{name} is on meta and not in the store {store.path}. Wrap a model with PEFT after nybble.stream() or "
                "load it with memory for its weights; for another tensor, check that the store is one of this model"
            )
        dtype, shape = store.kind(store_name(name))
        if shape != list(parameter.shape):
            expected = f"{list(parameter.shape)} by the config; check that the store is one of this model"
            raise ValueError(f"{name}: found shape {shape} in the store {store.path}, expected {expected}")
        if dtype not in RESIDENT_DTYPES:
            expected = f"one of {', '.join(RESIDENT_DTYPES)}; copy the store again, or quantise the original again"
            raise ValueError(f"{name}: found {dtype} in the store {store.path}, expected {expected}")
    for name, parameter in wanted.items():
        owner, _, leaf = name.rpartition(".")
        tensor = store.tensor(store_name(name)).to(device, copy=True)
        value = torch.nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        model.get_submodule(owner)._parameters[leaf] = value
    _rebuild_buffers(model, device)
    model.tie_weights()
    named = [*model.named_parameters(), *model.named_buffers()]
    left = [name for name, tensor in named if tensor.is_meta]
    left = [name for name in left if store_name(name).removesuffix(".weight") not in streamed]
    if left:
        raise ValueError(f"{len(left)} tensors have no value after loading, expected none: {', '.join(left[:5])}")


def _rebuild_buffers(model: torch.nn.Module, device: torch.device) -> None:
    # inv_freq is in no checkpoint; only its class knows how to compute it from the config. Nor is Gemma's embed_scale.
    for name, module in list(model.named_modules()):
        if not any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
            continue
        if hasattr(module, "scalar_embed_scale"):
            module._buffers["embed_scale"] = torch.tensor(module.scalar_embed_scale, device=device)
            continue
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._modules[leaf] = type(module)(config=model.config).to(device)
