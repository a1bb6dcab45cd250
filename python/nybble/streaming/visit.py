"""Visits: when a layer's weights are fetched, and when its slot is free again.

A visit begins in the layer's own forward, so that it is part of what checkpointing recomputes. In a forward it ends
with the layer's body. In a backward it ends when the gradient of the layer's input is final, or with the backward;
that end only lets the next copy start earlier: nothing breaks when it never comes.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import torch
from torch._C import _current_graph_task_id
from torch.autograd import Variable

from ..errors import StaleWeightError
from . import native
from .activations import AutoKeep

_ADVICE = (
    "Enable gradient checkpointing on every layer (model.gradient_checkpointing_enable(), every_n_layers=1), use "
    'activations="keep", a window of at least {layers}, or torch.no_grad() where no gradient is wanted'
)

_PATIENCE_MS = 1000  # for autograd to drop a backward that has failed


def _hooks() -> str | None:
    """Who is given what autograd saves now: "checkpoint" (torch's, which recomputes it), "others", or None."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return None
    return "checkpoint" if getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint" else "others"


class _BackwardEnd:
    """Called when a backward is over. Only autograd holds it: it is gone when a backward has ended or failed."""

    __slots__ = ("__weakref__", "_call")

    def __init__(self, call: Callable[[], None]):
        self._call = call

    def __call__(self) -> None:
        self._call()


class Fetcher:
    """The ring as the layers of one model use it, on the device's current stream."""

    def __init__(self, ring: native.Ring, layers: int, window: int, device: torch.device):
        self.ring = ring
        self.layers = layers
        self.window = window
        self._cuda_index = device.index or 0 if device.type == "cuda" else None
        self._streams: set[int] = set()  # that visits ran on, beside the one that the slots were allocated on
        if self._cuda_index is not None:
            self._streams.add(torch._C._cuda_getCurrentRawStream(self._cuda_index))
        self.check: Callable[[int], None] | None = None  # of a layer's bytes, for finding who overwrites slots
        self._visitor: int | None = None  # the thread whose visit is running
        self._backward: tuple[weakref.ref, int] | None = None  # the one that fetched last: its end, its thread
        self._last = -1  # the layer of the last acquire that succeeded: surely in its slot
        self._open_backward = -1

    def _stream(self) -> int | None:
        if self._cuda_index is None:
            return None
        stream = torch._C._cuda_getCurrentRawStream(self._cuda_index)
        if stream not in self._streams:
            self._saw(stream)
        return stream

    def _saw(self, stream: int) -> None:
        """Has torch give the slots' memory away only after what this stream holds by then."""
        external = torch.cuda.ExternalStream(stream, self.ring.slots[0].device)
        for slot in self.ring.slots:
            slot.record_stream(external)
        self._streams.add(stream)

    def open_visit(self, backward: bool) -> None:
        """From here until close_visit the model belongs to this thread."""
        self._require_alone(backward)
        self._visitor = threading.get_ident()

    def _require_alone(self, backward: bool) -> None:
        """Refuses what would refill slots that another thread reads: in a visit, or in a backward, which reads until it
        ends. Backwards that share autograd's thread of a GPU need no more than each multiply's own check.
        """
        thread, other = threading.get_ident(), self._backward
        share = self._cuda_index is not None and torch._C._is_multithreading_enabled()
        beside = other is not None and (not backward or (not share and other[1] != thread))
        if self._visitor not in (None, thread) or (beside and self._backward_runs()):
            raise RuntimeError(
                "a streamed model was run from two threads at once, which would refill slots that the other one reads; "
                "use a lock, or one streamed model a thread"
            )

    def _backward_runs(self) -> bool:
        """Whether the last backward is still under way. One that failed may take a moment until autograd drops it."""
        for _ in range(_PATIENCE_MS):
            last = self._backward  # its own thread sets it to None at its end
            if last is None or last[0]() is None:
                return False
            time.sleep(0.001)
        return True

    def visited_by_another(self) -> bool:
        return self._visitor not in (None, threading.get_ident())

    def close_visit(self) -> None:
        if self._visitor == threading.get_ident():
            self._visitor = None

    def acquire(self, layer: int, order: int) -> None:
        self._last = -1
        self.ring.acquire(layer, order, self._stream())
        if self.check is not None:
            self.check(layer)
        self._last = layer

    def refetch(self, layer: int) -> None:
        """For a backward that kept its activations: fetches the layer unless it was the last one fetched."""
        if self._last != layer:
            self._require_alone(backward=True)
            self.acquire(layer, native.BACKWARD)
        self.release_after_backward()

    def release(self, layer: int) -> None:
        self.ring.release(layer, self._stream())

    def release_after_backward(self) -> None:
        """Has the slot that is still held released at the end of the backward that is running, if one is."""
        task = _current_graph_task_id()
        if task not in (-1, self._open_backward):
            end = _BackwardEnd(self._release_last)
            Variable._execution_engine.queue_callback(end)
            self._open_backward, self._backward = task, (weakref.ref(end), threading.get_ident())

    def _release_last(self) -> None:
        self._open_backward, self._backward = -1, None
        if self._last >= 0:
            self.release(self._last)


class LayerVisit:
    """One layer's visits. active: its forward (first or recomputed) is running. scoped: the multiplies must save
    their weights under hooks of their own, as no checkpoint recomputes this layer.
    """

    fetcher: Fetcher  # set once the ring exists

    def __init__(self, index: int, name: str):
        self.index = index
        self.name = name
        self.keep = False  # may change between forwards; what a graph was recorded with is in its hooks
        self.auto: AutoKeep | None = None
        self.active = False
        self.scoped = False

    @torch.compiler.disable
    def enter(self, layer: torch.nn.Module, x) -> bool:
        """Fetches the layer. Returns whether this is a recomputation inside a backward."""
        backward = _current_graph_task_id() != -1
        recorded = torch.is_grad_enabled() and isinstance(x, torch.Tensor)
        # A reentrant recomputation runs under the hooks of whoever called backward.
        scoped = recorded and (_hooks() == "others" if backward else self._must_scope(layer, x))
        fetcher = self.fetcher
        fetcher.open_visit(backward)
        order = native.BACKWARD if backward else native.FORWARD if layer.training else native.REPEAT
        fetcher.acquire(self.index, order)
        self.scoped = scoped
        self.unpack = self._unpack_kept if self.keep else self._unpack
        self.active = True
        if backward:
            fetcher.release_after_backward()
            if self.auto is not None:
                self.auto.recomputation_begins(self.index)
        # A non-reentrant recomputation sees the very tensor that the first forward hooked; a reentrant one a new leaf.
        if recorded and x.requires_grad and (not backward or x.grad_fn is None):
            x.register_hook(self._release_hook)
        return backward

    @torch.compiler.disable
    def leave(self, backward: bool) -> None:
        if self.fetcher.visited_by_another():
            return  # this one was refused, and what is active is the other's
        self.active = False
        self.fetcher.close_visit()
        if not backward:
            self.fetcher.release(self.index)
        elif self.auto is not None:
            self.auto.recomputation_ends(self.index)

    def _release_hook(self, grad: torch.Tensor) -> None:
        self.fetcher.release(self.index)

    def _must_scope(self, layer: torch.nn.Module, x: torch.Tensor) -> bool:
        hooks = _hooks()
        if self.fetcher.window >= self.fetcher.layers or hooks == "checkpoint":
            return hooks == "others"  # that would take copies of the weights, which lie in no slot
        if not self.keep and layer.training and (x.requires_grad or any(p.requires_grad for p in layer.parameters())):
            raise StaleWeightError(
                f"{self.name} runs with gradients but without checkpointing, and its weights leave their slot before "
                f"the backward (window {self.fetcher.window} of {self.fetcher.layers} layers). "
                + _ADVICE.format(layers=self.fetcher.layers)
            )
        return True

    # Hooks around one multiply, so that they see its weights only. Autograd's own version check, which says nothing
    # about slots, does not apply to hooked tensors; the multiply's check of the owner does.
    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def _unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def _unpack_kept(self, tensor: torch.Tensor) -> torch.Tensor:
        self.fetcher.refetch(self.index)
        return tensor
