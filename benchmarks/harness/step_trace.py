"""The values of a training step as checksums, in the order in which they are made: which operation is the first whose
result differs from that of an earlier step? For step_repeats.py.

All that was recorded before it is equal, so its operands are, as far as they are recorded: of every projection,
forward, recomputation and backward, the base multiply and both of LoRA's, and of every layer what it puts out.
"""

import re

import torch
from torch._C import _current_graph_task_id

PARTS = {"base_layer": "the base multiply", "lora_A.default": "LoRA's A", "lora_B.default": "LoRA's B"}
LAYER = re.compile(r"layers\.\d+$")


class Trace:
    """Hooks on a PEFT model of the Llama kind. take() ends a step and gives its (name, checksum) in order."""

    def __init__(self, model):
        self._names: list[str] = []
        self._sums: list[torch.Tensor] = []
        self._factors: torch.Tensor | None = None
        self._handles = []
        for path, module in model.named_modules():
            short = path[path.find("layers.") :]
            part = next((text for end, text in PARTS.items() if path.endswith(end)), None)
            if part is not None:
                name = f"{short.rsplit('.lora_' if 'lora' in part.lower() else '.base', 1)[0]}, {part}"
                self._handles.append(module.register_forward_hook(self._forward(name, "base" in part)))
            elif LAYER.search(path):
                self._handles.append(module.register_forward_hook(self._forward(f"{short}, whole", False)))
        for path, parameter in model.named_parameters():
            if parameter.requires_grad:
                name = f"{path[path.find('layers.') :].removesuffix('.default.weight')}, its gradient"
                self._handles.append(parameter.register_hook(self._gradient(name)))

    def take(self) -> list[tuple[str, int]]:
        sums = torch.stack(self._sums).tolist() if self._sums else []
        found = list(zip(self._names, sums, strict=True))
        self._names, self._sums = [], []
        return found

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _record(self, name: str, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            bits = tensor.detach().reshape(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
            if self._factors is None or len(self._factors) < len(bits):
                generator = torch.Generator().manual_seed(1)
                few = torch.randint(1 << 30, (1 << 16,), generator=generator, dtype=torch.int32).to(bits.device)
                self._factors = (few * 2 + 1).repeat(-(-len(bits) // len(few)))
            self._names.append(name)
            self._sums.append((bits * self._factors[: len(bits)]).sum())

    def _gradient(self, name: str):
        def hook(gradient):
            self._record(name, gradient)

        return hook

    def _forward(self, name: str, node: bool):
        def hook(module, args, out):
            out = out[0] if isinstance(out, tuple) else out
            self._record(f"{name}, {'forward' if _current_graph_task_id() == -1 else 'recomputed'}", out)
            if not out.requires_grad:
                return
            out.register_hook(self._gradient(f"{name}, gradient of its output"))
            if node:
                out.grad_fn.register_hook(lambda inputs, _: self._inputs(f"{name}, gradient of its input", inputs))

        return hook

    def _inputs(self, name: str, inputs) -> None:
        for each in inputs:
            if each is not None:
                self._record(name, each)


def first_difference(found: list[tuple[str, int]], expected: list[tuple[str, int]]) -> str | None:
    """The name of the first value of `found` that is another in `expected`, None when there is none. Values that only
    one of them has, as a layer that keeps its activations is not recomputed, say nothing.
    """
    then = dict(expected)
    return next((name for name, value in found if then.get(name, value) != value), None)
