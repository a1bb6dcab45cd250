"""Layers of different shape in one model, and modules that can't stream."""

import json
import pathlib

import bitsandbytes as bnb
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import (
    ALL_LINEARS,
    LAYERS,
    ResidentLinear4bit,
    Store,
    assert_equal,
    batches,
    checkpointed,
    step,
    with_adapters,
)

import nybble

LATE = {"poison": True, "land_at_wait": True}
WIDTHS = [160, 224, 96, 160, 192]  # of the layers' MLPs; one block of 64 does not divide a row of 96


def uneven_model(store: Store) -> torch.nn.Module:
    """A dense Llama whose layers have MLPs of different width."""
    torch.manual_seed(9)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(store))
    for layer, width in zip(model.model.layers, WIDTHS, strict=True):
        mlp = layer.mlp
        mlp.gate_proj, mlp.up_proj = (torch.nn.Linear(64, width, bias=False) for _ in range(2))
        mlp.down_proj = torch.nn.Linear(width, 64, bias=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def quantised(model: torch.nn.Module, device) -> torch.nn.Module:
    """Its projections in 4 bit, as bitsandbytes makes them."""
    for layer in model.model.layers:
        for path, module in list(layer.named_modules()):
            if not isinstance(module, torch.nn.Linear):
                continue
            small = ResidentLinear4bit(
                module.in_features, module.out_features, False, torch.float32, quant_type="nf4", device="meta"
            )
            small.weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4")
            owner, _, leaf = path.rpartition(".")
            setattr(layer.get_submodule(owner), leaf, small)
    torch.nn.Module.to(model, device)
    model.is_loaded_in_4bit = True
    return model


@pytest.fixture(scope="module")
def uneven(stores, tmp_path_factory):
    """(its store, the resident model)."""
    folder = tmp_path_factory.mktemp("uneven")
    model = quantised(uneven_model(stores()), "cpu")
    save_file({k: v.clone() for k, v in model.state_dict().items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((pathlib.Path(stores()) / "config.json").read_text())
    store = Store(folder)
    store.device = stores().device
    return store, torch.nn.Module.to(model, store.device)


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("activations", ["recompute", "keep", 2])
def test_layers_of_different_shape_are_exact(stores, uneven, window, activations):
    store, resident = uneven
    model = uneven_model(stores())
    streamed = nybble.stream(model, store, device=store.device, window=window, activations=activations, **LATE)
    stats = nybble.memory_stats(streamed)
    assert stats["slot_bytes"] == window * stats["layer_bytes"] and stats["host_bytes"] < LAYERS * stats["layer_bytes"]
    ids = batches(1, store.device)[0]
    with torch.no_grad():
        assert torch.equal(streamed(ids).logits, resident(ids).logits)
    if not hasattr(resident, "peft_config"):
        resident = with_adapters(resident, ALL_LINEARS)
    expected = step(checkpointed(resident))
    resident.unload()
    assert_equal(step(checkpointed(with_adapters(streamed, ALL_LINEARS))), expected, at_least=14 * LAYERS)


def test_a_4_bit_weight_in_another_kind_of_module_is_refused_by_name(stores):
    class Other(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(stores()))
    mlp = model.model.layers[3].mlp
    mlp.up_proj = Other(mlp.up_proj.weight)
    with pytest.raises(ValueError, match=r"model\.layers\.3\.mlp\.up_proj is a Other with a 4-bit weight, expected"):
        nybble.stream(model, stores(), device=stores().device)


@pytest.mark.parametrize("found", ["gemma3", "mixtral", "llama4_text"])
def test_other_families_are_refused_by_name(stores, tmp_path, found):
    config = json.loads((pathlib.Path(stores()) / "config.json").read_text()) | {"model_type": found}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(load_file(pathlib.Path(stores()) / "model.safetensors"), tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"model_type '{found}', expected one of llama, .*gemma3_text, phi3"):
        nybble.stream(None, tmp_path, device=stores().device)
