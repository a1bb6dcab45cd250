"""What a visit costs: no torch operation, no tensor, no binding of a module: all of that is done once, at the start."""

import torch
from tiny_models import LAYERS, batches, checkpointed, step, streamed_model, with_adapters
from torch.utils._python_dispatch import TorchDispatchMode

import nybble


class Operations(TorchDispatchMode):
    """Torch operations that run while it is in force, by name."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_visit_runs_no_operation_of_torch(stores):
    model = streamed_model(stores()).eval()
    layers, before = model.model.layers, nybble.memory_stats(model)["refills"]
    x = torch.zeros(1, 2, 64, device=model.device)
    with torch.no_grad(), Operations() as operations:
        for layer in [*layers, *layers]:
            visit = layer._nybble_visit
            visit.leave(visit.enter(layer, x))
        assert operations.seen == []
        model(input_ids=batches(1, model.device)[0])
    assert sum("nybble.linear_4bit" in name for name in operations.seen) == 7 * LAYERS
    assert nybble.memory_stats(model)["refills"] - before >= 3 * LAYERS - 4


def bindings(model) -> dict:
    """What each streamed module multiplies with: the parameter and where it and its scales lie."""
    found = {}
    for row in model.get_base_model()._nybble_streamed.weights:
        for weight in row:
            places = [tensor.data_ptr() for tensor in weight.tensors if tensor is not None]
            found[weight.name] = (
                id(weight.parameter),
                id(weight.parameter.quant_state),
                *map(id, weight.tensors),
                *places,
            )
    modules = {name: id(m.weight) for name, m in model.named_modules() if hasattr(m, "_nybble_weight")}
    assert len(found) == len(modules) == 7 * LAYERS
    return found | modules


def test_steps_leave_every_binding_as_it_was(stores):
    model = checkpointed(with_adapters(streamed_model(stores())))
    before = bindings(model)
    refills = nybble.memory_stats(model)["refills"]
    step(model, count=2)
    assert bindings(model) == before
    assert nybble.memory_stats(model)["refills"] > refills + 2 * LAYERS
    first, third = (model.get_base_model().model.layers[index].mlp.up_proj.weight for index in (0, 2))
    assert first is not third and first.data_ptr() == third.data_ptr()  # two views of one slot
