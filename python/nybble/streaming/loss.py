"""Cross entropy over a long vocabulary in chunks of tokens: the logits never exist as a whole.

For t tokens and a vocabulary of v, transformers' loss holds 12 t v bytes at its peak (log-probabilities and two
gradients in float32). Here it is 10 bytes a logit of one chunk, and the gradient of the hidden states, which is made
together with the loss, while the chunk's logits are at hand.
"""

from __future__ import annotations

import contextlib
import functools
import inspect

import torch
from torch.nn.functional import cross_entropy, linear, pad
from transformers.modeling_outputs import CausalLMOutputWithPast

from .skeleton import base_model_of

CHUNK_BYTES = 128 << 20  # of a chunk's logits in float32
IGNORED = -100


def chunk_tokens(vocabulary: int) -> int:
    """Tokens whose logits in float32 take CHUNK_BYTES, at least 1."""
    return max(1, CHUNK_BYTES // (4 * vocabulary))


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the cross entropies of hidden [t, h] times weight [v, h] against targets [t], over `items`.

    targets: int64, -100 is ignored. items: a 0-dim tensor. softcap: c, for logits of c tanh(logits / c), or None.
    chunk: tokens at a time. Returns a float32 scalar. As in transformers, the multiply is done in the weight's dtype
    (or autocast's) and the rest in float32. weight gets no gradient.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, items, softcap, chunk):
        kind, dtype, plainly = hidden.device.type, weight.dtype, contextlib.nullcontext()
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype, plainly = torch.get_autocast_dtype(kind), torch.autocast(kind, enabled=False)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        wanted = ctx.needs_input_grad[0]
        gradient = torch.empty_like(hidden) if wanted else None
        with plainly:
            weight = weight.to(dtype)
            for start in range(0, hidden.shape[0], chunk):
                here = slice(start, start + chunk)
                logits = linear(hidden[here].to(dtype), weight).float()
                if softcap is not None:
                    logits = logits.div_(softcap).tanh_().mul_(softcap)
                total += cross_entropy(logits, targets[here], ignore_index=IGNORED, reduction="sum")
                if wanted:
                    gradient[here] = _slope(logits, targets[here], items, softcap).to(dtype) @ weight
        ctx.save_for_backward(gradient)
        return total / items

    @staticmethod
    def backward(ctx, grad_loss):
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss.to(gradient.dtype), None, None, None, None, None


def _slope(logits, targets, items, softcap):
    """The gradient of the loss in the logits before the softcap. Overwrites nothing that is needed later."""
    slope = torch.softmax(logits, -1)
    counted = targets != IGNORED
    slope.scatter_add_(-1, targets.clamp_min(0).unsqueeze(-1), -counted.unsqueeze(-1).float())
    slope *= (counted / items).unsqueeze(-1)
    if softcap is not None:
        slope *= 1 - (logits / softcap).square_()
    return slope


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    shift: bool = True,
    num_items_in_batch: torch.Tensor | int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """transformers' causal loss from the last hidden states and the head's weight.

    hidden: [batch, tokens, h], any float dtype. weight: [v, h], not trained. labels: [batch, tokens] int64, -100 where
    nothing is predicted. shift: tokens before n predict n. num_items_in_batch: what the sum is divided by, by default
    the number of predictions. Returns a float32 scalar that differs from the unchunked one by rounding only.
    ValueError for a weight that is trained or labels of another shape.
    """
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError("the head's weight is trained, expected a frozen one; use the model's own loss")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels have shape {list(labels.shape)}, expected {list(hidden.shape[:-1])} as the hidden states"
        )
    targets = labels.to(hidden.device)
    if shift:
        targets = pad(targets, (0, 1), value=IGNORED)[..., 1:]
    targets = targets.reshape(-1)
    if num_items_in_batch is None:
        items = (targets != IGNORED).sum()
    else:
        items = torch.as_tensor(num_items_in_batch, device=hidden.device)
    chunk = chunk or chunk_tokens(weight.shape[0])
    flat = hidden.reshape(-1, hidden.shape[-1])
    return ChunkedCrossEntropy.apply(flat, weight, targets, items.float(), softcap, chunk)


@functools.cache
def _chunked_class(base: type) -> type:
    """A subclass of a causal LM's class that computes its loss in chunks. Its name stays."""
    signature = inspect.signature(base.forward)

    @functools.wraps(base.forward)
    def forward(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs).arguments
        extra = given.pop("kwargs", {})
        labels, shifted = given.pop("labels", None), extra.pop("shift_labels", None)
        if labels is None and shifted is None:
            return base.forward(self, *args, **kwargs)
        items = extra.pop("num_items_in_batch", None)
        given.pop("self")
        given.pop("logits_to_keep", None)
        outputs = self.base_model(**given, **extra)
        loss = chunked_cross_entropy(
            outputs.last_hidden_state,
            self.lm_head.weight,
            labels if shifted is None else shifted,
            shift=shifted is None,
            num_items_in_batch=items,
            softcap=getattr(self.config, "final_logit_softcapping", None),
            chunk=self._nybble_chunk,
        )
        return CausalLMOutputWithPast(loss=loss, hidden_states=outputs.hidden_states, attentions=outputs.attentions)

    body = {
        "forward": forward,
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "_nybble_whole": base,
    }
    return type(base.__name__, (base,), body)


def chunk_loss(model: torch.nn.Module, tokens: int | None = None) -> torch.nn.Module:
    """Has a transformers causal LM, streamed or not, PEFT-wrapped or not, compute its loss `tokens` at a time, in
    place. Default: as many as make 128 MiB of logits. With labels its outputs then have no logits; without labels
    nothing changes. whole_loss() undoes it. ValueError for a head with adapters, a bias or training.
    """
    base = base_model_of(model)
    head = base.get_output_embeddings()
    if type(head) is not torch.nn.Linear or head.bias is not None or head is not getattr(base, "lm_head", None):
        raise ValueError(
            f"the head is a {type(head).__name__}, expected lm_head to be a Linear without bias or adapters"
        )
    if tokens is not None and tokens < 1:
        raise ValueError(f"tokens is {tokens}, expected at least 1")
    base._nybble_chunk = tokens
    if not hasattr(type(base), "_nybble_whole"):
        base.__class__ = _chunked_class(type(base))
    return model


def whole_loss(model: torch.nn.Module) -> torch.nn.Module:
    """Undoes chunk_loss."""
    base = base_model_of(model)
    if hasattr(type(base), "_nybble_whole"):
        base.__class__ = type(base)._nybble_whole
        del base._nybble_chunk
    return model
