"""A trainer that streams, as one would write it without nybble: modules on meta, weights as Params4bit views of a few
recycled tensors, bound by functional_call inside a checkpointed function.
"""

import types

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState, quantize_4bit
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import nybble

LAYERS, SLOTS, WIDTH, HIDDEN = 5, 2, 64, 128
SHAPES = {"first": (HIDDEN, WIDTH), "second": (WIDTH, HIDDEN)}


class Layer(torch.nn.Module):
    """Two 4-bit linears on meta, an adapter on the first. The last multiply has no adapter: its backward is the first
    thing that reads a weight, which is what uncovers an op that hides its weight from checkpointing.
    """

    def __init__(self, device):
        super().__init__()
        for name, (n, k) in SHAPES.items():
            linear = bnb.nn.Linear4bit(k, n, bias=name == "first", compute_dtype=torch.bfloat16, device="meta")
            setattr(self, name, linear)
        self.lora_a = torch.nn.Parameter(0.1 * torch.randn(4, WIDTH, device=device))
        self.lora_b = torch.nn.Parameter(0.1 * torch.randn(HIDDEN, 4, device=device))
        self.adapters = True

    def forward(self, x):
        h = self.first(x)
        if self.adapters:
            h = h + (x @ self.lora_a.t().to(x.dtype)) @ self.lora_b.t().to(x.dtype)
        return x + self.second(torch.tanh(h))


def parts_of(packed, state) -> dict[str, torch.Tensor]:
    return {"packed": packed, "absmax": state.absmax, "nested": state.state2.absmax, "offset": state.offset}


class Runtime:
    """Layers whose `forward` is `site`, over SLOTS recycled slots handed out in turn. lazy: a broken runtime that does
    not fill a slot again in the recomputation.
    """

    def __init__(self, device, site, mode="dequant", guard="uid", lazy=False):
        generator = torch.Generator(device).manual_seed(1)
        torch.manual_seed(2)
        self.device, self.lazy, self.loads, self.cursor = device, lazy, 0, 0
        self.layers = [Layer(device) for _ in range(LAYERS)]
        self.host, self.states = [], {}
        for _ in range(LAYERS):
            weights = {}
            for name, shape in SHAPES.items():
                dense = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) / 8
                packed, state = quantize_4bit(dense, blocksize=64, quant_type="nf4", compress_statistics=True)
                self.states[name] = state
                weights |= {f"{name}.{part}": t.clone() for part, t in parts_of(packed, state).items()}
            self.host.append(weights)
        self.bias = torch.randn(HIDDEN, generator=generator, device=device)
        self.slots = [{key: torch.empty_like(t) for key, t in self.host[0].items()} for _ in range(SLOTS)]
        self.views = [self._views(slot) for slot in self.slots]
        self.pool = nybble.SlotPool()
        self.ids = [self.pool.add_slot(list(slot.values())) for slot in self.slots]
        self.uids = [self.pool.register(f"layer {index}") for index in range(LAYERS)]
        self.checked = []
        for index, layer in enumerate(self.layers):
            for linear in (layer.first, layer.second):
                linear.mode = mode
                linear.guard = self.uids[index] if guard == "uid" else self._callable(index)
                linear.forward = types.MethodType(site, linear)

    def _views(self, slot):
        """Params4bit and QuantState over a slot's tensors, made once."""
        views = {}
        for name, like in self.states.items():
            inner = QuantState(slot[f"{name}.nested"], code=like.state2.code, blocksize=256, dtype=torch.float32)
            state = QuantState(
                slot[f"{name}.absmax"], like.shape, like.code, like.blocksize, "nf4", like.dtype,
                slot[f"{name}.offset"], inner,
            )  # fmt: skip
            packed = slot[f"{name}.packed"]
            views[f"{name}.weight"] = bnb.nn.Params4bit(packed, quant_state=state, bnb_quantized=True)
        return views

    def _callable(self, index):
        def guard(packed):
            slot = next(
                i for i, s in enumerate(self.slots) if any(t.data_ptr() == packed.data_ptr() for t in s.values())
            )
            self.checked.append(index)
            if self.pool.holds(self.ids[slot])[0] != int(self.uids[index]):
                raise RuntimeError(f"slot {slot} holds another layer than {index}")

        return guard

    def load(self, index):
        slot = self.cursor % SLOTS
        self.cursor += 1
        self.loads += 1
        self.pool.begin_fill(self.ids[slot])
        for key, tensor in self.slots[slot].items():
            tensor.copy_(self.host[index][key])
        self.pool.ready(self.ids[slot], self.uids[index])
        return slot

    def visit(self, index, x):
        recomputing = torch._C._current_graph_task_id() != -1
        if self.lazy and recomputing:
            slot = index % SLOTS
        else:
            slot = self.load(index)
        parameters = self.views[slot] | {"first.bias": self.bias}
        return functional_call(self.layers[index], parameters, (x,))

    def forward(self, x, checkpointed=True):
        for index in range(LAYERS):
            if checkpointed:
                x = checkpoint(self.visit, index, x, use_reentrant=False)
            else:
                x = self.visit(index, x)
        return x

    def step(self, x) -> dict[str, torch.Tensor]:
        """Output, and every gradient there is."""
        y = self.forward(x)
        y.float().pow(2).mean().backward()
        found = {"y": y.detach().clone()}
        for index, layer in enumerate(self.layers):
            for name, parameter in layer.named_parameters():
                if parameter.grad is not None:
                    found[f"{index} {name}"] = parameter.grad.clone()
        if x.grad is not None:
            found["x"] = x.grad.clone()
        return found
