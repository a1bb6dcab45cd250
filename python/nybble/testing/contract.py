"""The aliasing contract of a frozen 4-bit multiply, as checks that run on anyone's op.

Trainers that stream or offload layers reuse the buffers of a weight. Under gradient checkpointing the backward must
then read the tensors that the recomputation saved, and never those that the first forward happened to see. An op that
keeps its weight or its scales on ctx, outside save_for_backward, breaks this without any error: outputs stay right,
gradients do not.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ..quantize import dense_weight
from .weights import Weight, spoil

Op = Callable[..., torch.Tensor]  # op(x, packed, quant_state, bias=None) -> y

_N, _K, _ROWS = 96, 128, 6
# How far an op may be from float64, as a multiple of a dense multiply's own error. In 16 bit the rounding of the result
# rules, the same for all; in fp32 the order of the sums does, which is anyone's choice.
_ERROR_RATIO = {torch.bfloat16: 1.05, torch.float16: 1.05, torch.float32: 2.0}


class ContractViolation(AssertionError):
    """The op breaks the aliasing contract. `findings` maps each check to the reason, or None where it holds."""

    def __init__(self, findings: dict[str, str | None]):
        self.findings = findings
        broken = [f"{name}: {reason}" for name, reason in findings.items() if reason]
        super().__init__("\n".join(broken))


class _Case:
    """One op with the inputs of a check. Everything is made anew for each check."""

    def __init__(self, op: Op, device, dtype: torch.dtype, nested: bool):
        self.op = op
        self.weight = Weight.random(_N, _K, device, dtype, nested)
        generator = torch.Generator().manual_seed(11)
        self.x = torch.randn(_ROWS, _K, generator=generator).to(device, dtype).requires_grad_()
        self.grad_y = torch.randn(_ROWS, _N, generator=generator).to(device, dtype)
        self.bias = torch.randn(_N, generator=generator).to(device, dtype).requires_grad_()

    def forward(self, weight: Weight | None = None, x: torch.Tensor | None = None, **kwargs) -> torch.Tensor:
        weight = weight or self.weight
        return self.op(self.x if x is None else x, weight.packed, weight.state, **kwargs)

    def grad_of(self, y: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(y, self.x, self.grad_y)[0]

    def expected(self) -> torch.Tensor:
        """grad_x of the op itself, undisturbed."""
        return self.grad_of(self.forward())


def _reachable_tensor(root: Any, depth: int = 6) -> str | None:
    """The path to a tensor that an object keeps alive through attributes, containers or closures; None if there
    is none.
    """
    seen: set[int] = set()
    pending: list[tuple[Any, str, int]] = [(root, "ctx", depth)]
    skipped = (types.ModuleType, type, types.BuiltinFunctionType, torch.dtype, torch.device, str, bytes)
    while pending:
        item, path, left = pending.pop()
        if isinstance(item, torch.Tensor):
            return path
        if id(item) in seen or left == 0 or isinstance(item, skipped):
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            children = [(value, f"{path}[{key!r}]") for key, value in item.items()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            children = [(value, f"{path}[{i}]") for i, value in enumerate(item)]
        elif isinstance(item, types.FunctionType):
            names = item.__code__.co_freevars
            children = [
                (cell.cell_contents, f"{path}.{name}")
                for name, cell in zip(names, item.__closure__ or (), strict=False)
            ]
        elif isinstance(item, types.MethodType):
            children = [(item.__self__, f"{path}.__self__"), (item.__func__, f"{path}.__func__")]
        else:
            children = [(value, f"{path}.{key}") for key, value in getattr(item, "__dict__", {}).items()]
            children += [
                (getattr(item, key), f"{path}.{key}")
                for key in getattr(type(item), "__slots__", ())
                if hasattr(item, key)
            ]
        pending += [(child, child_path, left - 1) for child, child_path in children]
    return None


def graph_nodes(root) -> list:
    """All autograd nodes below a grad_fn, each once."""
    seen, pending, nodes = set(), [root], []
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes.append(node)
        pending += [following for following, _ in node.next_functions]
    return nodes


def saved_only(case: _Case) -> str | None:
    """(i) No node of the graph reaches a tensor except through its saved tensors."""
    y = case.forward(bias=case.bias)
    for node in graph_nodes(y.grad_fn):
        path = _reachable_tensor(getattr(node, "__dict__", None))
        if path:
            return f"{type(node).__name__} keeps a tensor at {path}; pass it to save_for_backward instead"
    return None


def freed_after_checkpoint(case: _Case) -> str | None:
    """(ii) After a checkpointed forward nothing keeps the weight's storages alive."""
    held = [case.weight.clone()]
    storages = held[0].storages()
    y = checkpoint(lambda x: case.forward(held[0], x), case.x, use_reentrant=False)
    held.clear()
    gc.collect()
    alive = [name for name, storage in storages.items() if not storage.expired()]
    del y
    return f"{', '.join(alive)} stay alive after a checkpointed forward and del" if alive else None


def recomputation_is_read(case: _Case) -> str | None:
    """The gradient comes from the tensors of the recomputation, though those of the first forward were
    overwritten meanwhile.
    """
    expected = case.expected()
    for early_stop in (True, False):
        fetched: list[Weight] = []

        def layer(x, fetched=fetched):
            fetched.append(case.weight.clone())
            return case.forward(fetched[-1], x)

        with set_checkpoint_early_stop(early_stop):
            y = checkpoint(layer, case.x, use_reentrant=False)
            fetched[0].poison()
            if not torch.equal(case.grad_of(y), expected):
                return f"grad_x was computed from the overwritten weight of the first forward (early_stop={early_stop})"
    return None


def writes_are_noticed(case: _Case) -> str | None:
    """(iii) Without checkpoint, a write to a weight tensor before backward raises, or does not matter because it
    is not read.
    """
    expected = case.expected()
    silent = []
    for name in case.weight.tensors():
        weight = case.weight.clone()
        y = case.forward(weight)
        spoil(weight.tensors()[name])
        try:
            grad = case.grad_of(y)
        except RuntimeError:
            continue
        if not torch.equal(grad, expected):
            silent.append(name)
    return f"a write to {', '.join(silent)} before backward changed grad_x without an error" if silent else None


class _WeightReads(TorchDispatchMode):
    """Logs every op that reads one of the given storages."""

    def __init__(self, log: list[str], addresses: set[int]):
        super().__init__()
        self.log = log
        self.addresses = addresses

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if any(tensor.untyped_storage().data_ptr() in self.addresses for tensor in tensors):
            self.log.append(f"launch {func}")
        return func(*args, **(kwargs or {}))


def unpacked_before_launch(case: _Case) -> str | None:
    """(iv) In backward the saved tensors are unpacked before any op reads a weight."""
    log: list[str] = []
    copies: list[torch.Tensor] = []  # what the hooks hand back, alive so that addresses stay unique

    def pack(tensor):
        copies.append(tensor.detach().clone())
        return len(copies) - 1

    def unpack(index):
        log.append("unpack")
        return copies[index]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = case.forward()
    addresses = set(case.weight.addresses()) | {copy.untyped_storage().data_ptr() for copy in copies}
    with _WeightReads(log, addresses):
        case.grad_of(y)
    launches = [i for i, entry in enumerate(log) if entry != "unpack"]
    if not launches:
        return "no op that reads the weight was seen in backward"
    if "unpack" not in log[: launches[0]]:
        return f"{log[launches[0]]} came before any saved tensor was unpacked"
    if "unpack" in log[launches[0] :]:
        return f"a saved tensor was unpacked after {log[launches[0]]}"
    return None


def _too_far(name: str, value: torch.Tensor, dense: torch.Tensor, exact: torch.Tensor) -> str | None:
    """A reason when value is further from exact (float64) than a dense multiply's result in the same dtype is."""
    error, dense_error = (float((item.double() - exact).norm() / exact.norm()) for item in (value, dense))
    if error <= _ERROR_RATIO[dense.dtype] * dense_error:
        return None
    return f"{name} differs from float64 by {error:.2e}, a dense multiply by {dense_error:.2e}"


def gradients_are_right(case: _Case) -> str | None:
    """(v) grad_x and grad_bias are as close to float64 as those of a dense multiply by the same weights."""
    y = case.forward(bias=case.bias)
    grad_x, grad_bias = torch.autograd.grad(y, (case.x, case.bias), case.grad_y)
    dense = dense_weight(case.weight.packed, case.weight.state, case.x.dtype)
    exact_x = case.grad_y.double() @ dense.double()
    exact_bias = case.grad_y.double().sum(0)
    return _too_far("grad_x", grad_x, case.grad_y @ dense, exact_x) or _too_far(
        "grad_bias", grad_bias, case.grad_y.sum(0), exact_bias
    )


def double_backward_is_right(case: _Case) -> str | None:
    """(v) Differentiating grad_x gives the right numbers or a clear error."""
    grad_y = case.grad_y.clone().requires_grad_()
    direction = case.x.detach()
    try:
        grad_x = torch.autograd.grad(case.forward(), case.x, grad_y, create_graph=True)[0]
        second = torch.autograd.grad(grad_x, grad_y, direction)[0]
    except (RuntimeError, NotImplementedError):
        return None
    dense = dense_weight(case.weight.packed, case.weight.state, case.x.dtype)
    exact = direction.double() @ dense.double().t()
    return _too_far("the second derivative", second, direction @ dense.t(), exact)


CHECKS: dict[str, Callable[[_Case], str | None]] = {
    "saved_only": saved_only,
    "freed_after_checkpoint": freed_after_checkpoint,
    "recomputation_is_read": recomputation_is_read,
    "writes_are_noticed": writes_are_noticed,
    "unpacked_before_launch": unpacked_before_launch,
    "gradients_are_right": gradients_are_right,
    "double_backward_is_right": double_backward_is_right,
}


def findings(
    op: Op, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16, nested: bool = True
) -> dict[str, str | None]:
    """Runs every check; maps its name to the reason why the op fails it, or None. What an op raises by itself is
    a reason too.
    """
    results: dict[str, str | None] = {}
    for name, check in CHECKS.items():
        try:
            results[name] = check(_Case(op, device, dtype, nested))
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results


def checkpoint_contract(
    op: Op, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16, nested: bool = True
) -> None:
    """Raises ContractViolation (an AssertionError) unless a 4-bit multiply is safe where layers are streamed,
    offloaded or recomputed.

    op: called as op(x, packed, quant_state) and op(x, packed, quant_state, bias=bias), e.g. nybble.linear or
    bitsandbytes.matmul_4bit. x [6, 128] and bias [96] in dtype, packed uint8 of [96, 128], quant_state a
    nybble.QuantState (bitsandbytes' fields), nested or plain. The exception lists every broken point; its `findings`
    has one entry a check (see CHECKS).
    """
    results = findings(op, device=device, dtype=dtype, nested=nested)
    if any(results.values()):
        raise ContractViolation(results)
