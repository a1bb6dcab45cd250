"""One training step of a streamed or resident model, as what a gate compares."""

from __future__ import annotations

import torch

import nybble
from nybble.gate.multiply import moved
from nybble.gate.runner import Outcome


def step_outcome(model: torch.nn.Module, ids: torch.Tensor) -> Outcome:
    """One forward and backward: hidden states, loss and logits by layer, then every adapter's gradient by layer."""
    layers = model.get_base_model().base_model.layers
    parts = len(layers)
    model.zero_grad(set_to_none=True)
    before, hidden = nybble.path_counters(), []
    hooks = [layer.register_forward_hook(lambda _m, _a, out: hidden.append(out)) for layer in layers]
    try:
        result = model(input_ids=ids, labels=ids, use_cache=False)
        forward = [{"hidden": first_tensor(out).detach().clone()} for out in hidden[:parts]]
        forward[-1] |= {"logits": result.logits.detach().clone(), "loss": result.loss.detach().clone()}
        result.loss.backward()
    except Exception as error:  # an arm that dies is a result: the runner compares it with the prediction
        text, stale = f"{type(error).__name__}: {error}", isinstance(error, nybble.StaleWeightError)
        return Outcome([], [], raised=text, stale=stale)
    finally:
        for hook in hooks:
            hook.remove()
    backward, nonzero = [{} for _ in range(parts)], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            within = name.split(".layers.")[1]
            backward[int(within.split(".")[0])][within] = parameter.grad.clone()
            nonzero += [parameter] if "lora_B" in name else []
    return Outcome(forward, backward, nonzero, moved(before, nybble.path_counters()))


def first_tensor(output) -> torch.Tensor:
    """Decoder layers return a tensor, or a tuple that begins with it."""
    return output if isinstance(output, torch.Tensor) else output[0]
