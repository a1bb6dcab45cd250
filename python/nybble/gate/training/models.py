"""The store's model, streamed and resident, with the same adapters, and a switch between multiplies.

Needs transformers, peft and bitsandbytes; import it where a gate runs, not where it is named.
"""

from __future__ import annotations

from pathlib import Path

import bitsandbytes as bnb
import peft
import torch
from transformers import AutoConfig

import nybble
from nybble import _ops, autograd
from nybble.quant_state import mode_code
from nybble.quantize import dense_weight
from nybble.streaming.modules import StreamedLinear4bit

QV = ("q_proj", "v_proj")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MODE = 6  # place of the mode in a multiply's spec
RANK = 8


class Switch:
    """What every switched linear of a model does: a mode of nybble's, "dense" or "bitsandbytes"."""

    def __init__(self, arm: str = "auto"):
        self.arm = arm


class SwitchedLinear4bit(bnb.nn.Linear4bit):
    """A resident weight, multiplied as the switch says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        arm = self.switch.arm
        if arm == "bitsandbytes":
            return super().forward(x)
        if arm == "dense":
            return torch.nn.functional.linear(x, self.dense())
        return nybble.linear(x.to(self.compute_dtype), self.weight, self.weight.quant_state, mode=arm).to(x.dtype)

    def dense(self) -> torch.Tensor:
        """The real weight, dequantised once: a multiply by it decodes nothing. Not a parameter, so it is not saved."""
        if "held_dense" not in self.__dict__:
            self.__dict__["held_dense"] = dense_weight(self.weight, self.weight.quant_state)
        return self.__dict__["held_dense"]


SwitchedLinear4bit.__name__ = "Linear4bit"  # PEFT and transformers look it up by name


class WeightOnCtx(torch.autograd.Function):
    """nybble's kernels in the unsafe shape: the weight is an attribute of ctx, so no recomputation renews it."""

    @staticmethod
    def forward(ctx, x, tensors, uid, spec):
        ctx.weight = tensors, uid, spec
        return autograd._launch(_ops.linear_4bit, x, *tensors, None, uid, *spec)

    @staticmethod
    def backward(ctx, grad_y):
        tensors, uid, spec = ctx.weight
        return autograd.launch_grad_input(grad_y, (*tensors, uid), spec, None), None, None, None


class UnrepairedLinear4bit(StreamedLinear4bit):
    """A streamed weight under WeightOnCtx: what streaming does without the repair. checked: owners are verified."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self._nybble_weight
        uid = weight.uid if self.checked else None
        return WeightOnCtx.apply(x.to(self.compute_dtype), self.kept(weight.tensors), uid, weight.spec).to(x.dtype)

    def kept(self, tensors: tuple) -> tuple:
        return tensors


class CopyingLinear4bit(UnrepairedLinear4bit):
    """The repair by private copies: every forward keeps one of its weight. Right gradients, the model's memory."""

    def kept(self, tensors: tuple) -> tuple:
        return tuple(None if t is None else t.clone() for t in tensors)


def streamed_linears(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if isinstance(module, StreamedLinear4bit)]


def set_streamed(
    model: torch.nn.Module, mode: str = "auto", *, repaired: bool = True, checked: bool = True, copies: bool = False
) -> int:
    """Switches every streamed linear; returns how many there are. copies: each keeps private copies, unchecked."""
    linears = streamed_linears(model)
    for module in linears:
        module.__class__ = StreamedLinear4bit if repaired else UnrepairedLinear4bit
        module.checked = checked
        if copies:
            module.__class__, module.checked = CopyingLinear4bit, False
        spec = module._nybble_weight.spec
        module._nybble_weight.spec = (*spec[:MODE], mode_code(mode), *spec[MODE + 1 :])
    return len(linears)


def streamed(store: Path, window: int, device: torch.device, attention: str = "eager", **ring) -> torch.nn.Module:
    """The base model, its layers streamed."""
    config = AutoConfig.from_pretrained(store, attn_implementation=attention)
    return nybble.stream(config, store, window=window, device=device, **ring)


def resident(store: Path, device: torch.device, switch: Switch, attention: str = "eager") -> torch.nn.Module:
    """The same base model with every weight on the device, each linear under the switch."""
    model = nybble.unstream(streamed(store, 1, device, attention))
    for module in switched_linears(model, bnb.nn.Linear4bit):
        module.__class__ = SwitchedLinear4bit
        module.switch = switch
    return model


def switched_linears(model: torch.nn.Module, kind: type = SwitchedLinear4bit) -> list[torch.nn.Module]:
    return [module for module in model.modules() if type(module) is kind]


def with_adapters(model: torch.nn.Module, targets=QV, *, early_stop: bool = True, seed: int = 3) -> torch.nn.Module:
    """LoRA whose B is not zero, the same numbers for every model, every layer checkpointed."""
    config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(targets), task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(wrapped.named_parameters()):
        if "lora_" in name:
            values = torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5
            parameter.data = (0.5 * values).to(parameter.device, torch.bfloat16)
    wrapped.train()
    wrapped.enable_input_require_grads()
    checkpoint(wrapped, early_stop)
    return wrapped


def checkpoint(model: torch.nn.Module, early_stop: bool) -> None:
    """Every layer is recomputed in the backward."""
    kwargs = {"use_reentrant": False, "early_stop": early_stop}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


def close(model: torch.nn.Module) -> None:
    """Ends the streaming of a model that will not be used again."""
    model.get_base_model()._nybble_streamed.close()
