"""Modules of the traced model that are not transformers' own: the 4-bit multiply and fused attention.

Both allocate what the kernels on a GPU allocate. The multiply keeps nothing, as its weight is in a slot. Attention
keeps q, k, v, its result and one float per head and token; its backward has a float32 accumulator for the gradient of q
and, where queries share heads of k and v, gradients of k and v for every query head.
"""

from __future__ import annotations

from collections.abc import Callable

import bitsandbytes as bnb
import torch
from transformers import AttentionInterface

ATTENTION = "nybble_plan"
Workspace = Callable[[int, int, int, bool], int]  # (tokens, n, k, forward) -> bytes of the multiply's workspace


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, n, workspace):
        k, tokens = x.shape[-1], x.numel() // x.shape[-1]
        ctx.call = tokens, n, k, workspace
        y = x.new_empty(*x.shape[:-1], n)
        scratch = x.new_empty(workspace(tokens, n, k, True), dtype=torch.uint8)
        del scratch
        return y

    @staticmethod
    def backward(ctx, grad_y):
        tokens, n, k, workspace = ctx.call
        grad_x = grad_y.new_empty(*grad_y.shape[:-1], k)
        scratch = grad_y.new_empty(workspace(tokens, n, k, False), dtype=torch.uint8)
        del scratch
        return grad_x, None, None


class PlannedLinear4bit(bnb.nn.Linear4bit):
    """What PEFT takes for a 4-bit module."""

    workspace: Workspace

    def forward(self, x):
        inp_dtype = x.dtype
        return _Multiply.apply(x.to(self.compute_dtype), self.out_features, self.workspace).to(inp_dtype)


def replace_linear(owner: torch.nn.Module, leaf: str, compute_dtype: torch.dtype, workspace: Workspace) -> None:
    """Puts a stand-in where a float projection is."""
    module = getattr(owner, leaf)
    planned = PlannedLinear4bit(
        module.in_features, module.out_features, module.bias is not None, compute_dtype, device="meta"
    )
    if planned.bias is not None:
        planned.bias = torch.nn.Parameter(planned.bias.to(module.bias.dtype), requires_grad=False)
    planned.weight.requires_grad_(False)
    planned.compute_type_is_set = True
    planned.workspace = workspace
    setattr(owner, leaf, planned)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value):
        batch, heads, tokens, _ = query.shape
        # [batch, tokens, heads, dim] in memory, so that the caller's contiguous() copies nothing
        out = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(batch, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        query, key, value, _, sums = ctx.saved_tensors
        scratch = [torch.empty_like(sums), torch.empty_like(query, dtype=torch.float32)]
        grad_q = torch.empty_like(query)
        if key.shape[1] != query.shape[1]:
            scratch += [query.new_empty(*query.shape[:3], t.shape[-1]) for t in (key, value)]
        grad_k, grad_v = torch.empty_like(key), torch.empty_like(value)
        del scratch
        return grad_q, grad_k, grad_v


def _attend(module, query, key, value, attention_mask, **kwargs):
    return _Attention.apply(query, key, value).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attend)
