"""nybble.stream: a transformers model whose decoder layers pass through a few slots."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Sequence

import torch
from tqdm import tqdm
from transformers import BitsAndBytesConfig, PretrainedConfig
from transformers.quantizers import AutoHfQuantizer
from transformers.utils.quantization_config import QuantizationMethod

from .._library import build_info
from ..errors import StaleWeightError, UnsupportedError
from ..quant_state import QUANT_TYPE_CODES, nested_table, table
from . import activations as policies
from . import modules, native, sharing, skeleton
from .replicas import FrozenNames
from .store import CheckpointStore
from .visit import Fetcher, LayerVisit
from .weights import StreamedWeight, Tables

_BAR_BYTES = 1 << 28  # smaller stores load without a progress bar

_live: weakref.WeakSet[Streamed] = weakref.WeakSet()


class Streamed:
    """Everything that one streamed model owns: arena, slots, ring, and what unstream() needs to undo it."""

    def __init__(
        self,
        model: torch.nn.Module,
        store: CheckpointStore,
        window: int,
        device: torch.device,
        pin: bool | None,
        share,
        check_bytes: bool,
        ring_options: dict,
    ):
        self.base = skeleton.base_model_of(model)
        self.device = device
        self.layers: Sequence[torch.nn.Module] = self.base.base_model.layers
        self.window = min(window, len(self.layers))
        self._owners: list[int] = []
        self._forget = weakref.finalize(self, _forget_owners, self._owners)
        self._unwatch = lambda: None
        self.projections = self._find(store)
        if share is None or share is False:
            self._load(store, native.Arena())
        else:
            self._load_shared(store, sharing.of_group(share))
        self.pinned_bytes = self._pin(pin) if device.type == "cuda" and pin is not False else 0
        self._make_ring(check_bytes, ring_options)

    def _find(self, store: CheckpointStore) -> list[dict[str, torch.nn.Linear]]:
        """Per layer, the modules whose weight is 4-bit in the store, by their name in the store."""
        prefix = next(name for name, module in self.base.named_modules() if module is self.layers)
        found = []
        for index, layer in enumerate(self.layers):
            here = {}
            for path, module in layer.named_modules():
                name = skeleton.store_name(f"{prefix}.{index}.{path}.").rstrip(".")
                if hasattr(module, "base_layer"):  # PEFT's wrapper of one
                    continue
                if not store.is_quantised(name):
                    store.require_dense(name)
                    continue
                if not isinstance(module, torch.nn.Linear):
                    raise ValueError(f"{name} is a {type(module).__name__} with a 4-bit weight, expected a Linear")
                here[name] = module
            if not here:
                raise ValueError(
                    f"layer {prefix}.{index} has no 4-bit weight in {store.path}; is it a store of this model?"
                )
            found.append(here)
        self.layer_names = [f"{prefix}.{index}" for index in range(len(self.layers))]
        return found

    def _plan(self, store: CheckpointStore) -> None:
        """Validates every weight of the store and makes room for it in the arena. The model is not touched."""
        self.weights: list[list[StreamedWeight]] = []
        self.layouts: list[tuple[int, dict[str, dict[str, int]]]] = []
        self.visits: list[LayerVisit] = []
        for layer_name, projections in zip(self.layer_names, self.projections, strict=True):
            stored = [store.weight(name) for name in projections]
            for weight, module in zip(stored, projections.values(), strict=True):
                shape = (module.out_features, module.in_features)
                if weight.shape != shape:
                    wanted = f"{list(shape)} as in the model; is it a store of this model?"
                    raise ValueError(f"{weight.name}.weight: found shape {list(weight.shape)}, expected {wanted}")
            short = [weight.name.removeprefix(layer_name + ".") for weight in stored]
            keys = [
                (name, part, size) for name, w in zip(short, stored, strict=True) for part, size in w.parts().items()
            ]
            names, sizes = [f"{name}.{part}" for name, part, _ in keys], [size for *_, size in keys]
            arena_layer, layout, offsets = self.arena.add_layer(names, sizes)
            where: dict[str, dict[str, int]] = {}
            for (name, part, _), offset in zip(keys, offsets, strict=True):
                where.setdefault(name, {})[part] = offset
            self.layouts.append((layout, where))
            uid = native.register_owner(layer_name, short)
            self._owners.append(uid)
            visit = LayerVisit(arena_layer, layer_name)
            self.visits.append(visit)
            row, first = [], 0
            for index, weight in enumerate(stored):
                row.append(StreamedWeight(weight, uid + index, visit, self.arena, arena_layer, first))
                first += len(weight.parts())
            self.weights.append(row)

    def _load(self, store: CheckpointStore, arena: native.Arena) -> None:
        self.arena = arena
        self._plan(store)
        self.arena.require_memory()
        self._fill(store)

    def _load_shared(self, store: CheckpointStore, shared: sharing.Shared) -> None:
        """The first process of this host fills the arena, the others map it and plan the same layers."""
        digest, fault = "", None
        try:
            if shared.leads:
                self._load(store, shared.new_arena())
                digest = sharing.fingerprint(self.weights, store)
        except Exception as error:  # told to the others first
            fault = error
        shared.filled(digest, fault)
        try:
            if not shared.leads:
                self.arena = shared.arena_of_leader()
                self._plan(store)
                digest = sharing.fingerprint(self.weights, store)
        except Exception as error:
            fault = error
        shared.attached(digest, fault)

    def _fill(self, store: CheckpointStore) -> None:
        weights = [weight for row in self.weights for weight in row]
        sizes = [sum(weight.stored.parts().values()) for weight in weights]
        quiet = True if sum(sizes) < _BAR_BYTES else None  # None: a bar on terminals only
        with tqdm(total=sum(sizes), unit="B", unit_scale=True, desc="layers to host memory", disable=quiet) as bar:
            for weight, size in zip(weights, sizes, strict=True):
                weight.fill(store)
                bar.update(size)

    def _pin(self, required: bool | None) -> int:
        """Page-locks the arena. Bytes that are locked."""
        _, total, _ = self.arena.size()
        pinned, reason = self.arena.pin()
        if pinned == total:
            return pinned
        text = f"{total - pinned} of {total} bytes of the streamed layers could not be page-locked ({reason})"
        if required:
            raise MemoryError(
                f"{text}; free or unlock host memory (ulimit -l), or pass pin=None to stream from pageable memory"
            )
        warnings.warn(
            f"{text} and stay pageable: their copies are several times slower (8 instead of 55 GB/s on an H200) and "
            "block the host, so that they hardly overlap with compute. Free host memory or raise the limit (ulimit -l)",
            stacklevel=4,
        )
        return pinned

    def _make_ring(self, check_bytes: bool, options: dict) -> None:
        _, _, self.layer_bytes = self.arena.size()
        self.slots = [torch.empty(self.layer_bytes, dtype=torch.uint8, device=self.device) for _ in range(self.window)]
        self.ring = native.Ring(self.arena, self._owners, self.slots, **options)
        fetcher = Fetcher(self.ring, len(self.layers), self.window, self.device)
        if check_bytes:
            fetcher.check = self._check_bytes
        for visit in self.visits:
            visit.fetcher = fetcher

    def _check_bytes(self, layer: int) -> None:
        slot, where = self.slots[layer % self.window], self.layouts[layer][1]
        try:
            for weight in self.weights[layer]:
                weight.require_bytes(slot, where[weight.name.removeprefix(self.layer_names[layer] + ".")])
        except StaleWeightError:
            self.ring.reset()  # the next visit fetches again
            raise

    def bind(self, keep: Sequence[bool], compute_dtype: torch.dtype) -> None:
        """Swaps the classes. From here on the layers stream."""
        self.tables = Tables({kind: table(kind, self.device) for kind in QUANT_TYPE_CODES}, nested_table(self.device))
        for index, layer in enumerate(self.layers):
            self.visits[index].keep = keep[index]
            slot = self.slots[index % self.window]
            where = self.layouts[index][1]
            for weight, module in zip(self.weights[index], self.projections[index].values(), strict=True):
                short = weight.name.removeprefix(self.layer_names[index] + ".")
                weight.bind(module, slot, where[short], self.tables)
                modules.stream_linear(module, weight, compute_dtype)
            modules.stream_layer(layer, self.visits[index])

    def keep_by_measure(self, meter) -> None:
        self._unwatch = policies.watch(self.base.base_model, self.visits, policies.AutoKeep(self.visits, meter))

    def unbind(self) -> None:
        self._unwatch()
        for layer, row, projections in zip(self.layers, self.weights, self.projections, strict=True):
            for weight, module in zip(row, projections.values(), strict=True):
                modules.resident_linear(module, weight.resident_parameter(module, self.device, self.tables))
            modules.resident_layer(layer)
        self.close()

    def close(self) -> None:
        self.ring.close()
        self._forget()

    def resident(self) -> list[torch.nn.Parameter]:
        """Parameters that do not stream."""
        streamed = {id(weight.parameter) for row in self.weights for weight in row}
        return [parameter for parameter in self.base.parameters() if id(parameter) not in streamed]

    def memory(self) -> dict[str, int]:
        layers, arena_bytes, layer_bytes = self.arena.size()
        return {
            "layers": layers,
            "window": self.window,
            "layer_bytes": layer_bytes,
            "slot_bytes": self.window * layer_bytes,
            "host_bytes": arena_bytes,
            "pinned_bytes": self.pinned_bytes,
            "layers_that_keep": sum(visit.keep for visit in self.visits),
            "resident_bytes": sum(p.numel() * p.element_size() for p in self.resident()),
            **self.ring.stats(),
        }


def _forget_owners(uids: list[int]) -> None:
    for uid in uids:
        native.lib.nybble_forget_owner(uid)


def _device_of(model: torch.nn.Module, device) -> torch.device:
    built = build_info()["cuda"] is not None
    if device is None:
        device = next((p.device for p in model.parameters() if not p.is_meta), None)
    if device is None:
        device = "cuda" if built and torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f'streaming to {device} is not supported, expected device="cpu" or "cuda"')
    if device.type == "cuda" and not built:
        raise UnsupportedError(
            f'streaming to {device}: nybble was built without CUDA; build with nvcc, or device="cpu"'
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(f'streaming to {device}: torch sees no CUDA device, expected one, or device="cpu"')
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _set_flags(base: torch.nn.Module, config: BitsAndBytesConfig, device: torch.device) -> None:
    """What transformers, PEFT, accelerate and TRL look at to see a 4-bit bitsandbytes model on one device."""
    base.is_loaded_in_4bit = True
    base.is_quantized = True
    base.quantization_method = QuantizationMethod.BITS_AND_BYTES
    base.hf_quantizer = AutoHfQuantizer.from_config(config, pre_quantized=True)
    base.hf_device_map = {"": device}
    base.config.quantization_config = config


def stream(
    model_or_config,
    store: str | os.PathLike,
    *,
    window: int = 2,
    device: torch.device | str | None = None,
    activations: str | int | Sequence[str] | Callable[[int], str] = "recompute",
    pin: bool | None = None,
    share=None,
    check_bytes: bool = False,
    **ring_options,
) -> torch.nn.Module:
    """A model whose decoder layers' 4-bit weights stay in host memory and pass through `window` slots on the device.

    model_or_config: a transformers config or None (the store's own config), from which the model is built without
    base weights in memory; or a causal LM, loaded or on meta, PEFT-wrapped or not, which is changed in place. PEFT may
    wrap it before (a model loaded in 4 bit) or after. Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3
    (text) and Phi-3 models; layers may differ in shape.
    store: a folder as `nybble quantize` writes it. device: where slots and resident tensors live; default the
    model's, else CUDA where there is one.
    activations: "recompute" needs gradient checkpointing on every layer; a layer that does "keep" is never recomputed,
    its weights are fetched again in backward; "auto" measures the first step and then has as many of the last layers
    keep as the GPU's memory allows, of each forward's tokens anew; or one of the first two per layer, as a list or a
    function of the layer's index; or how many of the last layers keep.
    pin: page-lock the host memory that a GPU copies from. None: where it is refused, warn and go on; True: MemoryError;
    False: don't.
    share: a torch.distributed process group, or True for the default one, all of whose ranks make this call: those on
    one host keep one copy of the base in its memory.
    check_bytes: compare a layer's slot with host memory at every visit, which waits for the device: for finding code
    that writes to slots behind torch's back.
    ring_options: prefetch, and for tests poison, land_at_wait, delay_us, chunk_bytes, observer (see native.Ring).

    Gradients equal those of the resident model bit for bit; a read of another layer's weight is a StaleWeightError.
    Raises ValueError for a model or store that does not fit, FileNotFoundError, and MemoryError.
    """
    if window < 1:
        raise ValueError(f"window is {window}, expected at least 1 slot")
    checkpoint = CheckpointStore(store)
    config = checkpoint.quantization_config()
    model = _model_of(model_or_config, checkpoint)
    base = skeleton.base_model_of(model)
    where = _device_of(model, device)
    auto = activations == "auto"
    meter = policies.meter_of(where) if auto else None
    keep = policies.fixed("recompute" if auto else activations, len(base.base_model.layers))
    streamed = Streamed(model, checkpoint, window, where, pin, share, check_bytes, ring_options)
    names = {weight.name for row in streamed.weights for weight in row}
    skeleton.fill_resident(base, checkpoint, streamed.device, names)
    streamed.bind(keep, config.bnb_4bit_compute_dtype)
    if auto:
        streamed.keep_by_measure(meter)
    if any(parameter.device != streamed.device for parameter in streamed.resident()):
        torch.nn.Module.to(model, streamed.device)  # slots stay where they are
    _set_flags(base, config, streamed.device)
    base._nybble_streamed = streamed
    base._ddp_params_and_buffers_to_ignore = FrozenNames(base)
    _live.add(streamed)
    checkpoint.close()
    return model


def _model_of(model_or_config, checkpoint: CheckpointStore) -> torch.nn.Module:
    """The model that is to stream, built where only a config is given. ValueError when it can't."""
    if model_or_config is None or isinstance(model_or_config, PretrainedConfig):
        model = skeleton.build(model_or_config, checkpoint)
    else:
        model = model_or_config
    base = skeleton.base_model_of(model)
    skeleton.require_supported(base.config)
    if "_nybble_streamed" in base.__dict__:
        raise ValueError("the model is streamed already; call nybble.unstream(model) first")
    _require_4bit_adapters(base)
    return model


def _require_4bit_adapters(base: torch.nn.Module) -> None:
    for name, module in base.named_modules():
        if hasattr(module, "base_layer") and type(module.base_layer) is torch.nn.Linear:
            raise ValueError(
                f"{name} is an adapter around a float Linear, whose LoRA rounds differently from the one PEFT uses for "
                "4-bit models; call nybble.stream() before wrapping, or load the model in 4 bit before wrapping"
            )


def unstream(model: torch.nn.Module) -> torch.nn.Module:
    """Puts every weight back on the device: the model is then a resident 4-bit bitsandbytes model, adapters
    included. Graphs recorded before can't be run backward any more. ValueError when the model is not streamed.
    """
    base = skeleton.base_model_of(model)
    streamed = base.__dict__.pop("_nybble_streamed", None)
    if streamed is None:
        raise ValueError("the model is not streamed, expected one that nybble.stream() returned")
    del base._ddp_params_and_buffers_to_ignore
    streamed.unbind()
    _live.discard(streamed)
    return model


def memory_stats(model: torch.nn.Module | None = None) -> dict[str, int]:
    """Bytes and counts of a streamed model, or sums over all live ones.

    layers, layers_that_keep (their activations), window (slots), layer_bytes (the largest), slot_bytes (weights on the
    device), host_bytes (the arena), pinned_bytes (of it, page-locked), resident_bytes (parameters that do not stream),
    visits, hits, refills, refill_bytes, cancelled, failed.
    """
    if model is None:
        total: dict[str, int] = {}
        for streamed in _live:
            for key, value in streamed.memory().items():
                total[key] = total.get(key, 0) + value
        return total
    streamed = skeleton.base_model_of(model).__dict__.get("_nybble_streamed")
    if streamed is None:
        raise ValueError("the model is not streamed, expected one that nybble.stream() returned")
    return streamed.memory()
