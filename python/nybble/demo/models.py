"""The same store twice: streamed through a few slots, and resident, with one and the same multiply."""

from __future__ import annotations

import functools
from pathlib import Path

import bitsandbytes as bnb
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import nybble

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK = 8


def streamed(store: Path, window: int, device: torch.device) -> PeftModel:
    """The model with its layers streamed, and fresh LoRA adapters on every linear of them."""
    config = AutoConfig.from_pretrained(store, attn_implementation="eager")
    model = nybble.stream(config, store, window=window, device=device)
    model = get_peft_model(
        for_device(model, device),
        LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, task_type="CAUSAL_LM"),
    )
    return ready_to_train(model)


def resident(store: Path, adapter: Path, device: torch.device) -> PeftModel:
    """The model as transformers and bitsandbytes load it, all layers in memory, the saved adapter loaded by PEFT."""
    model = AutoModelForCausalLM.from_pretrained(store, attn_implementation="eager", device_map={"": device})
    model = PeftModel.from_pretrained(for_device(model, device), adapter, is_trainable=True)
    switched = [module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    expected = len(TARGETS) * model.config.num_hidden_layers
    if len(switched) != expected:
        raise RuntimeError(f"{len(switched)} linears of the resident model are in 4 bits, expected {expected}")
    for module in switched:
        module.forward = functools.partial(resident_forward, module)
    return ready_to_train(model)


def resident_forward(module: bnb.nn.Linear4bit, x: torch.Tensor) -> torch.Tensor:
    """Linear4bit.forward with nybble's multiply on the module's own weight: no slots, no arena, nothing recycled."""
    y = nybble.linear(x.to(module.compute_dtype), module.weight, module.weight.quant_state, module.bias)
    return y.to(x.dtype)


def for_device(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """On a CPU, embeddings, head and norms in fp32: most CPUs have no fast bf16 matmul for the head."""
    if device.type == "cpu":
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.float()
    return model


def ready_to_train(model: PeftModel) -> PeftModel:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    model.config.use_cache = False
    return model.train()
