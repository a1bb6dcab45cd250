"""A training step on torch's meta device: what it allocates and when each piece is freed, without any memory.

The model is transformers' own code, built from the config; PEFT puts its adapters on it; checkpointing is torch's. So
what autograd keeps, and in which order it lets go, is observed, not modelled. What only a GPU has is in stand_ins.py.
"""

from __future__ import annotations

import dataclasses
import weakref

import peft
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..streaming.skeleton import base_model_of
from . import fold, stand_ins
from .source import ModelSource

ACTIVATIONS, LOSS, WORKING, GRADIENTS = "kept activations", "logits and loss", "working memory", "gradients"


@dataclasses.dataclass(frozen=True)
class Step:
    """One forward and backward. tokens: in all rows together; rows: sequences; keep: how many of the last layers keep
    their activations, the others recompute.
    """

    tokens: int
    rows: int = 1
    rank: int = 16
    targets: tuple[str, ...] = ()  # () = every projection that streams
    adapter_dtype: torch.dtype = torch.bfloat16
    keep: int = 0
    reentrant: bool = False
    chunked_loss: bool = False
    holds_gradients: bool = False  # of an earlier step, as with gradient accumulation


@dataclasses.dataclass
class Trace:
    """events: (key, bytes) for an allocation, (key, -1) for its end; the first `after` of them belong to the step,
    the rest free the gradients. multiplies: how many came before each thread's first cuBLAS call, which allocates its
    workspace. kinds: what each key is. resident, adapters: (name, bytes) of the parameters.
    """

    events: list[tuple[int, int]]
    after: int
    multiplies: list[int]
    kinds: list[str]
    resident: list[tuple[str, int]]
    adapters: list[tuple[str, int]]


_CUBLAS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _Recorder(TorchDispatchMode):
    """Sees every storage that an op returns first, and its end."""

    def __init__(self, step_tensors):
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self.marks: dict[str | tuple[str, int], int] = {}  # what began first, and after how many events
        self.keys: dict[int, tuple[int, weakref.ref]] = {}  # by id of a live storage
        self.count = 0
        for tensor in step_tensors:
            self._remember(tensor.untyped_storage(), -1)

    def mark(self, what: str | tuple[str, int]) -> None:
        self.marks.setdefault(what, len(self.events))

    def _remember(self, storage, key: int) -> None:
        identity = id(storage)

        def died(_):
            self.keys.pop(identity, None)
            if key >= 0:
                self.events.append((key, -1))

        self.keys[identity] = (key, weakref.ref(storage, died))

    def key_of(self, tensor: torch.Tensor) -> int:
        return self.keys[id(tensor.untyped_storage())][0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if not isinstance(tensor, torch.Tensor) or not tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            if id(storage) not in self.keys:
                self._remember(storage, self.count)
                self.events.append((self.count, storage.nbytes()))
                self.count += 1
        if func in _CUBLAS:
            self.mark("first multiply, backward" if _in_backward() else "first multiply")
        return result


def _target_modules(source: ModelSource, targets: tuple[str, ...]) -> list[str]:
    known = {path.rpartition(".")[2] for layer in source.layers for path in layer}
    unknown = sorted(set(targets) - known)
    if unknown:
        raise ValueError(
            f"targets has {', '.join(unknown)}, expected some of {', '.join(sorted(known))}, or all-linear"
        )
    return sorted(targets or known)


def build(source: ModelSource, step: Step, workspace: stand_ins.Workspace) -> torch.nn.Module:
    """The model with adapters, on meta, as a streamed one trains."""
    model = source.build("eager" if source.eager_attention else stand_ins.ATTENTION)
    for layer, shapes in zip(model.base_model.layers, source.layers, strict=True):
        for path in shapes:
            owner, _, leaf = path.rpartition(".")
            stand_ins.replace_linear(layer.get_submodule(owner), leaf, source.compute_dtype, workspace)
    model.is_loaded_in_4bit = True
    names = _target_modules(source, step.targets)
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=step.rank, target_modules=names, task_type="CAUSAL_LM"), autocast_adapter_dtype=False
    )
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(step.adapter_dtype)
    wrapped.train()
    wrapped.enable_input_require_grads()
    wrapped.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": step.reentrant})
    layers = model.base_model.layers
    for layer in layers[len(layers) - step.keep :]:
        layer.gradient_checkpointing = False
    if step.chunked_loss:
        from ..streaming.loss import chunk_loss

        chunk_loss(wrapped)
    return wrapped


def _sizes(model: torch.nn.Module, adapters: bool) -> list[tuple[str, int]]:
    return [
        (name, parameter.numel() * parameter.element_size())
        for name, parameter in model.named_parameters()
        if ("lora_" in name) == adapters and not isinstance(parameter, stand_ins.bnb.nn.Params4bit)
    ]


def _mark_layers(model: torch.nn.Module, recorder: _Recorder) -> None:
    """Marks where each decoder layer begins, forward ("f", layer) and backward ("b", layer), and the loss."""
    decoder = base_model_of(model).base_model
    layers, hooked = decoder.layers, set()

    def watch(index: int, layer: torch.nn.Module, follower: torch.nn.Module) -> None:
        def leaves(*_):
            if index == len(layers) - 1:
                recorder.mark("loss")

        def enters_follower(module, args):
            if index not in hooked:  # not again in its recompute, whose input is a copy
                hooked.add(index)
                args[0].register_hook(lambda grad: recorder.mark(("b", index)))

        layer.register_forward_pre_hook(lambda *_: recorder.mark(("f", index)))
        layer.register_forward_hook(leaves)
        # Not on the layer's own output: a reentrant checkpoint around its hooks (transformers before 5.24) runs them
        # without gradients.
        follower.register_forward_pre_hook(enters_follower)

    for index, layer in enumerate(layers):
        watch(index, layer, layers[index + 1] if index + 1 < len(layers) else decoder.norm)


def _masks(source: ModelSource, ids: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """What eager attention adds to the scores; the fused kernel needs none, as rows are not padded."""
    if not source.eager_attention:
        return None
    shape = (ids.shape[0], 1, ids.shape[1], ids.shape[1])
    return {kind: torch.empty(shape, dtype=source.resident_dtype, device="meta") for kind in source.config.layer_types}


def record(source: ModelSource, step: Step, workspace: stand_ins.Workspace = lambda *_: 0) -> Trace:
    """Traces the step; of many equal layers a few, which are then unfolded. ValueError for targets that the model does
    not have.
    """
    recomputed = len(source.layers) - step.keep
    extra = [max(0, count - fold.TRACED) for count in (recomputed, step.keep)]
    if not any(extra) or any(layer != source.layers[0] for layer in source.layers):
        return _record(source, step, workspace)[0]
    few = source.first_layers(len(source.layers) - sum(extra))
    trace, marks = _record(few, dataclasses.replace(step, keep=step.keep - extra[1]), workspace)
    middles = (fold.MIDDLE, recomputed + fold.MIDDLE)
    return _unfold(trace, marks, [(m, e) for m, e in zip(middles, extra, strict=True) if e])


def _record(source: ModelSource, step: Step, workspace: stand_ins.Workspace) -> tuple[Trace, dict]:
    model = build(source, step, workspace)
    ids = torch.empty(step.rows, step.tokens // step.rows, dtype=torch.int64, device="meta")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained if step.holds_gradients else []:
        parameter.grad = torch.empty_like(parameter)
    held = [parameter.grad for parameter in trained if parameter.grad is not None]
    recorder = _Recorder([*model.parameters(), *model.buffers(), *held, ids])
    _mark_layers(model, recorder)
    with recorder:
        loss = model(input_ids=ids, labels=ids, use_cache=False, attention_mask=_masks(source, ids)).loss
        recorder.mark("backward")
        loss.backward()
        del loss
        recorder.mark("after")
        gradients = {recorder.key_of(parameter.grad) for parameter in trained if parameter.grad is not None}
        for parameter in trained:
            parameter.grad = None
    events, marks = list(recorder.events), recorder.marks
    kinds = _kinds(events, recorder.count, marks, gradients)
    multiplies = sorted(at for what, at in marks.items() if str(what).startswith("first multiply"))
    return Trace(events, marks["after"], multiplies, kinds, _sizes(model, False), _sizes(model, True)), marks


def _unfold(trace: Trace, marks: dict, repeats: list[tuple[int, int]]) -> Trace:
    """repeats: (layer, how many more of it), from the first layer to the last, as numbered after those before."""
    starts = [(at, *what) for what, at in marks.items() if isinstance(what, tuple)]
    starts += [(0, "", 0), (marks["loss"], "", 1), (trace.after, "", 2)]
    segments = fold.cut(trace.events, trace.kinds, sorted(starts))
    places = [fold.place(segments, at) for at in trace.multiplies]
    resident, adapters = trace.resident, trace.adapters
    for middle, extra in repeats:
        segments = fold.repeat(segments, middle, extra)
        places = [(way, fold.moved(layer, middle, extra) if way else layer, offset) for way, layer, offset in places]
        resident, adapters = (fold.repeat_sizes(sizes, middle, extra) for sizes in (resident, adapters))
    events, kinds, begins = fold.join(segments)
    multiplies = [begins[way, layer] + offset for way, layer, offset in places]
    return Trace(events, begins["", 2], multiplies, kinds, resident, adapters)


def _kinds(events: list[tuple[int, int]], count: int, marks: dict[str, int], gradients: set[int]) -> list[str]:
    kinds, born = [WORKING] * count, {}
    loss_ends = min(
        (at for what, at in marks.items() if what[0] == "b" and isinstance(what, tuple)), default=len(events)
    )
    for index, (key, size) in enumerate(events):
        if size >= 0:
            born[key] = index
            if marks["loss"] <= index < loss_ends:
                kinds[key] = LOSS
        elif born[key] < marks["loss"] and index >= marks["backward"]:
            kinds[key] = ACTIVATIONS
    for key in gradients - {-1}:
        kinds[key] = GRADIENTS
    return kinds
