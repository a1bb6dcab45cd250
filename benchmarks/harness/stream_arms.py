"""What h200_stream.py compares: one streamed and one resident model, each switched between its arms.

Every arm takes the same LoRA training step: forward, loss, backward, AdamW on the adapters. Everything is bfloat16,
without autocast, whose casts would cost the host more than the streaming does.
"""

import math

import peft
import torch

import nybble
from nybble.quant_state import mode_code
from nybble.streaming import modules
from nybble.streaming.activations import AutoKeep, CudaMeter, watch

TARGETS = {
    "all": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qv": ["q_proj", "v_proj"],
}
MODE_FIELD = 6  # of StreamedWeight.spec
RESIDENT = ("resident_bnb", "resident")
AUTO = "streamed_auto"
STREAMED = ("streamed", "streamed_dequant", "streamed_keep", AUTO, "no_copies", "no_copies_keep", "no_decode")
# Multiply with whatever the slots hold, or with one dense weight: only times mean something.
GARBAGE = ("no_copies", "no_copies_keep", "no_decode")


def with_adapters(model, rank: int, targets: str = "all"):
    """LoRA with B not zero, the same numbers for every model."""
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS[targets], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, config)
    set_adapters(wrapped)
    wrapped.train()
    wrapped.enable_input_require_grads()
    return wrapped


def canonical(name: str) -> str:
    """A parameter's name without the wrapper that soup-cli puts around a layer."""
    return name.replace(".inner.", ".")


def set_adapters(wrapped) -> None:
    named = sorted((canonical(name), p) for name, p in wrapped.named_parameters() if "lora_" in name)
    generator = torch.Generator(named[0][1].device).manual_seed(3)
    for _, parameter in named:
        values = 0.01 * torch.randn(parameter.shape, generator=generator, device=parameter.device)
        parameter.data = values.to(torch.bfloat16)


class Arms:
    """A model, its optimiser, and the switch between arms."""

    def __init__(self, model):
        self.model = model
        self.adapters = [p for p in model.parameters() if p.requires_grad]
        on_gpu = self.adapters[0].is_cuda
        self.optimiser = torch.optim.AdamW(self.adapters, lr=1e-4, weight_decay=0.0, fused=on_gpu)
        self.device = self.adapters[0].device

    def checkpoint(self, on: bool, reentrant: bool = False) -> None:
        if on:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        else:
            self.model.gradient_checkpointing_disable()

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        self.optimiser.zero_grad(set_to_none=True)
        loss = self.gradients(ids)
        self.optimiser.step()
        return loss

    def gradients(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def copied_bytes(self) -> int:
        """From host to device, so far."""
        return 0

    def fingerprint(self) -> float:
        """Changes with the adapters."""
        return torch.stack([p.detach().double().square().sum() for p in self.adapters]).sum().item()

    def gradient_norm(self) -> float:
        return torch.nn.utils.get_total_norm([p.grad for p in self.adapters]).item()


class Resident(Arms):
    def switch(self, arm: str) -> None:
        self.checkpoint(True)
        base = self.model.get_base_model()
        if arm == "resident":
            nybble.patch(base)
        else:
            nybble.unpatch(base)


class ShareMeter(CudaMeter):
    """What one of several models in a process uses, under a limit of its own. others, limit_bytes: set from outside."""

    others = 0  # bytes that the other models hold
    limit_bytes = math.inf

    def allocated(self) -> int:
        return super().allocated() - self.others

    def limit(self) -> float:
        return min(super().limit() - self.others, self.limit_bytes)


class AutoByLength:
    """activations="auto" with one measured step for each length, as lengths take turns here."""

    def __init__(self, visits, meter):
        self.visits, self.meter = visits, meter
        self.autos: dict[int, AutoKeep] = {}
        self.now: AutoKeep | None = None

    def forward_begins(self, tokens: int) -> None:
        if tokens not in self.autos:
            self.autos[tokens] = AutoKeep(self.visits, self.meter)
        self.now = self.autos[tokens]
        self.now.forward_begins(tokens)

    def recomputation_begins(self, layer: int) -> None:
        self.now.recomputation_begins(layer)

    def recomputation_ends(self, layer: int) -> None:
        self.now.recomputation_ends(layer)


class Streamed(Arms):
    def __init__(self, model):
        super().__init__(model)
        self.meter = ShareMeter(self.device)
        self.auto: AutoByLength | None = None
        self.unwatch = lambda: None
        self.streamed = model.get_base_model()._nybble_streamed
        self.fetcher = self.streamed.visits[0].fetcher
        self.weights = [weight for row in self.streamed.weights for weight in row]
        self.uids = [weight.uid for weight in self.weights]
        self.multiply = modules.multiply
        self.dense: dict[tuple[int, int], torch.Tensor] = {}

    def copied_bytes(self) -> int:
        return nybble.memory_stats(self.model)["refill_bytes"]

    def multiply_dense(self, x, tensors, bias, uid, spec, guard):
        n, k = shape = spec[:2]
        if shape not in self.dense:
            self.dense[shape] = (0.02 * torch.randn(n, k, device=x.device)).to(x.dtype)
        return torch.nn.functional.linear(x, self.dense[shape], bias)

    def watch_auto(self):
        if self.auto is None:
            self.auto = AutoByLength(self.streamed.visits, self.meter)
        return watch(self.model.get_base_model().base_model, self.streamed.visits, self.auto)

    def switch(self, arm: str) -> None:
        without = arm.startswith("no_copies")
        keep, mode = arm.endswith("_keep"), "dequant" if arm == "streamed_dequant" else "auto"
        self.checkpoint(not keep, reentrant=arm == "streamed_reentrant")
        self.unwatch()
        self.unwatch = self.watch_auto() if arm == AUTO else lambda: None
        for visit in self.streamed.visits:
            visit.keep = keep
        for weight, uid in zip(self.weights, self.uids, strict=True):
            weight.spec = (*weight.spec[:MODE_FIELD], mode_code(mode), *weight.spec[MODE_FIELD + 1 :])
            weight.uid = None if without else uid
        for call in ("acquire", "release"):
            vars(self.fetcher).pop(call, None)
            if without:
                setattr(self.fetcher, call, lambda *_: None)
        modules.multiply = self.multiply_dense if arm == "no_decode" else self.multiply
        if arm != "no_decode":
            self.dense.clear()
