"""What else touches a streamed model: saving, loading, copying, moving, PEFT's other methods, the Trainer."""

import copy
import io
import os
import pathlib
import subprocess
import types
import warnings

import bitsandbytes as bnb
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_models import (
    ALL_LINEARS,
    FAMILIES,
    LAYERS,
    Store,
    assert_equal,
    batches,
    checkpointed,
    linears_of,
    resident_model,
    step,
    streamed_model,
    with_adapters,
)

import nybble
from nybble.streaming import model as model_module
from nybble.streaming import native

LATE = {"poison": True, "land_at_wait": True}


@pytest.fixture
def streamed(stores):
    return streamed_model(stores(), **LATE)


def test_no_tensor_stays_on_meta_and_flags_say_4_bit(streamed):
    tensors = [*streamed.parameters(), *streamed.buffers()]
    assert len(tensors) > 7 * LAYERS
    assert not any(tensor.is_meta for tensor in tensors)
    assert streamed.is_loaded_in_4bit and streamed.is_quantized and streamed.hf_quantizer.is_trainable
    assert streamed.quantization_method == "bitsandbytes"
    assert streamed.hf_device_map == {"": streamed.device}
    assert type(streamed.model.layers[0]).__name__ == "LlamaDecoderLayer"
    assert isinstance(streamed.model.layers[0], transformers.models.llama.modeling_llama.LlamaDecoderLayer)
    lora = with_adapters(streamed).base_model.model.model.layers[0].self_attn.q_proj
    assert type(lora) is peft.tuners.lora.bnb.Linear4bit
    assert lora.lora_A["default"].weight.device == streamed.device


def test_memory_stats_count_slots_and_not_the_model(streamed):
    stats = nybble.memory_stats(streamed)
    assert stats["slot_bytes"] == 2 * stats["layer_bytes"]
    assert stats["host_bytes"] == LAYERS * stats["layer_bytes"]
    resident = sum(p.numel() * p.element_size() for p in streamed.parameters() if type(p) is torch.nn.Parameter)
    assert stats["resident_bytes"] == resident > 0
    assert nybble.memory_stats()["slot_bytes"] >= stats["slot_bytes"]
    with pytest.raises(ValueError, match="not streamed"):
        nybble.memory_stats(torch.nn.Linear(2, 2))


def test_host_memory_is_looked_at_before_anything_is_read_and_the_model_is_as_it_was(stores, monkeypatch):
    read = []
    fill = native.Arena.fill_tensor
    monkeypatch.setattr(native.Arena, "fill_tensor", lambda *args: read.append(args) or fill(*args))

    def too_little(arena):
        raise MemoryError("the streamed layers need 7 bytes of host memory, 3 are available")

    model = resident_model(stores())
    before = {name: (type(module), sorted(vars(module))) for name, module in model.named_modules()}
    with monkeypatch.context() as patch:
        patch.setattr(native.Arena, "require_memory", too_little)
        with pytest.raises(MemoryError, match="need 7 bytes of host memory, 3 are available"):
            nybble.stream(model, stores(), **LATE)
    assert read == []
    assert {name: (type(module), sorted(vars(module))) for name, module in model.named_modules()} == before
    nybble.stream(model, stores(), **LATE)
    assert len(read) == 3 * 7 * LAYERS  # codes, scales, nested scales


class Bar:
    """Stands in for tqdm."""

    made = None

    def __init__(self, total, disable, **_):
        self.total, self.disable, self.updates = total, disable, []
        self.update = self.updates.append
        Bar.made = self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_filling_host_memory_has_a_progress_bar_that_ends_at_its_total(stores, monkeypatch):
    monkeypatch.setattr(model_module, "tqdm", Bar)
    streamed_model(stores())
    assert Bar.made.disable is True  # small: none
    monkeypatch.setattr(model_module, "_BAR_BYTES", 0)
    host = nybble.memory_stats(streamed_model(stores()))["host_bytes"]
    bar = Bar.made
    assert bar.disable is None and len(bar.updates) == 7 * LAYERS  # None: where the output is a terminal
    assert sum(bar.updates) == bar.total and 0.5 * host < bar.total <= host  # parts are padded in the arena


def test_bytes_that_stay_pageable_are_one_warning_with_what_they_cost_or_an_error():
    arena = types.SimpleNamespace(size=lambda: (1, 100, 100), pin=lambda: (40, "lock refused"))
    owner = types.SimpleNamespace(arena=arena)
    with pytest.warns(UserWarning) as seen:
        assert model_module.Streamed._pin(owner, None) == 40
    (warning,) = seen
    text = str(warning.message)
    assert "60 of 100 bytes" in text and "(lock refused)" in text and "8 instead of 55 GB/s on an H200" in text
    assert "ulimit -l" in text
    with pytest.raises(MemoryError, match=r"60 of 100 bytes .* \(lock refused\); free or unlock host memory"):
        model_module.Streamed._pin(owner, True)
    arena.pin = lambda: (100, "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model_module.Streamed._pin(owner, None) == 100


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrapped", [False, True])
def test_state_dict_equals_the_resident_models(stores, wrapped, family):
    models = [streamed_model(stores(family), **LATE), resident_model(stores(family))]
    if wrapped:
        models = [with_adapters(model, linears_of(family)) for model in models]
    found, expected = (model.state_dict() for model in models)
    assert list(found) == list(expected)
    assert len(found) > 4 * len(linears_of(family)) * LAYERS
    for name, tensor in expected.items():
        assert torch.equal(found[name].to(tensor.device), tensor), name
        assert found[name].dtype == tensor.dtype, name


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "phi3"])  # with its own head, and tied ones
def test_saving_keeps_every_key_and_loads_again(stores, family, tmp_path):
    streamed = streamed_model(stores(family), **LATE)
    streamed.save_pretrained(tmp_path / "saved")
    found = load_file(tmp_path / "saved" / "model.safetensors")
    expected = load_file(pathlib.Path(stores(family)) / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    buffer = io.BytesIO()
    torch.save(streamed.state_dict(), buffer)
    reloaded = nybble.stream(None, tmp_path / "saved", device=stores().device, **LATE)
    both = [step(checkpointed(with_adapters(model, linears_of(family)))) for model in (reloaded, streamed)]
    assert_equal(*both, at_least=2 * len(linears_of(family)) * LAYERS)


def test_adapters_save_and_load_into_a_resident_model(stores, streamed, tmp_path):
    model = with_adapters(streamed).eval()
    model.save_pretrained(tmp_path)
    other = peft.PeftModel.from_pretrained(resident_model(stores()), tmp_path).eval()
    with torch.no_grad():
        ids = batches(1, model.device)[0]
        assert torch.equal(model(ids).logits, other(ids).logits)


def test_loading_base_weights_is_refused_and_adapters_load(streamed):
    state = {name: tensor.clone() for name, tensor in streamed.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"q_proj is streamed from its store, but the state dict brings 6 tensors"):
        streamed.load_state_dict(state)
    model = with_adapters(streamed)
    adapters = {name: torch.full_like(t, 0.5) for name, t in peft.get_peft_model_state_dict(model).items()}
    peft.set_peft_model_state_dict(model, adapters)
    assert all((p == 0.5).all() for n, p in model.named_parameters() if "lora_" in n)


def test_copies_pickles_and_merges_are_refused(streamed):
    model = with_adapters(streamed).eval()
    for attempt in (copy.deepcopy, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(TypeError, match=r"can't be copied or pickled.*nybble\.unstream"):
            attempt(model)
    for attempt in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(nybble.StaleWeightError, match=r"was read outside of its layer's forward.*nybble\.unstream"):
            attempt()
    with torch.no_grad():
        assert torch.isfinite(model(batches(1, model.device)[0]).logits).all()


def test_dora_start_values_are_refused(streamed):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
    with pytest.raises(TypeError, match=r"can't be copied.*nybble\.unstream"):  # PEFT copies the base layer for them
        peft.get_peft_model(streamed, config)


def test_another_parameter_in_a_streamed_module_is_an_error(streamed):
    linear = streamed.model.layers[1].mlp.up_proj
    linear.weight = bnb.nn.Params4bit(linear.weight.data.clone(), requires_grad=False, bnb_quantized=True)
    with pytest.raises(nybble.StaleWeightError, match=r"layers\.1\.mlp\.up_proj left the ring"):
        streamed(batches(1, streamed.device)[0])


def test_casts_leave_slots_alone(stores, streamed):
    before = [p.data_ptr() for p in streamed.parameters() if isinstance(p, bnb.nn.Params4bit)]
    for target in (
        streamed.device,
        torch.float64,
        torch.float32,
    ):  # transformers' own .to() refuses dtypes of 4-bit models
        torch.nn.Module.to(streamed, target)
    assert streamed.model.norm.weight.dtype == torch.float32
    assert [p.data_ptr() for p in streamed.parameters() if isinstance(p, bnb.nn.Params4bit)] == before
    with torch.no_grad():
        ids = batches(1, streamed.device)[0]
        assert torch.equal(streamed(ids).logits, resident_model(stores())(ids).logits)


def test_unstream_gives_a_resident_model_with_the_same_bytes(stores, streamed):
    model = checkpointed(with_adapters(streamed, ALL_LINEARS))
    expected = step(model)
    with pytest.raises(ValueError, match="streamed already"):
        nybble.stream(model, stores())
    nybble.unstream(model)
    linears = [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert len(linears) == 7 * LAYERS
    assert len({m.weight.data_ptr() for m in linears}) == 7 * LAYERS
    assert all(type(m) is bnb.nn.Linear4bit for m in linears)
    reference = resident_model(stores()).state_dict()
    base = model.get_base_model().state_dict()
    for name, tensor in reference.items():
        assert torch.equal(base[name] if name in base else base[name.replace("_proj.", "_proj.base_layer.")], tensor), (
            name
        )
    for module in linears:
        module.__class__ = type(resident_model(stores()).model.layers[0].mlp.up_proj)
        break
    nybble.stream(model, stores(), **LATE)
    assert_equal(step(model), expected, at_least=14 * LAYERS)
    with pytest.raises(ValueError, match="not streamed"):
        nybble.unstream(torch.nn.Linear(2, 2))


def test_a_model_that_is_gone_gives_its_slots_back(stores):
    import gc
    import weakref

    model = streamed_model(stores())
    ring = weakref.ref(model._nybble_streamed.ring)
    del model
    gc.collect()
    assert ring() is None


def test_a_dense_model_and_a_config_stream_as_the_store_itself(stores):
    dense = transformers.AutoModelForCausalLM.from_pretrained(str(pathlib.Path(stores()).parent / "dense"))
    config = transformers.AutoConfig.from_pretrained(stores())
    expected = step(checkpointed(with_adapters(resident_model(stores()))))
    for start in (dense, config):
        model = nybble.stream(start, stores(), device=stores().device, **LATE)
        assert_equal(step(checkpointed(with_adapters(model))), expected, at_least=4 * LAYERS)
    assert nybble.memory_stats(dense)["visits"] == 2 * LAYERS


def test_float_adapters_and_other_architectures_are_refused(stores, tmp_path):
    dense = transformers.AutoModelForCausalLM.from_pretrained(str(pathlib.Path(stores()).parent / "dense"))
    wrapped = peft.get_peft_model(dense, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="adapter around a float Linear"):
        nybble.stream(wrapped, stores())
    with pytest.raises(ValueError, match="model_type 'gpt2', expected one of llama"):
        nybble.stream(transformers.GPT2Config(), stores())
    for arguments, message in (
        ({"window": 0}, "window is 0"),
        ({"activations": "offload"}, 'expected "recompute", "keep" or "auto"'),
        ({"activations": ["keep"]}, f"each of {LAYERS} layers"),
    ):
        with pytest.raises(ValueError, match=message):
            streamed_model(stores(), **arguments)
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        nybble.stream(None, tmp_path)


def test_trainer_takes_the_same_three_steps(stores, tmp_path):
    store = stores()

    def train(model):
        arguments = transformers.TrainingArguments(
            tmp_path / "run",
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            learning_rate=1e-2,
            max_grad_norm=0.5,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=store.device.type == "cpu",
            seed=1,
        )
        data = [{"input_ids": row, "labels": row} for ids in batches(6) for row in ids]
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        trainer.train()
        log = [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "grad_norm" in e]
        return log, {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

    start = {n: p.detach().clone() for n, p in with_adapters(resident_model(stores())).named_parameters()}
    expected, found = (
        train(with_adapters(model)) for model in (resident_model(stores()), streamed_model(stores(), **LATE))
    )
    assert found[0] == expected[0] and len(found[0]) == 3
    assert_equal(found[1], expected[1], at_least=4 * LAYERS)
    assert all(not torch.equal(tensor, start[name]) for name, tensor in found[1].items())


def test_a_store_written_by_the_command_streams(stores, tmp_path):
    command = pathlib.Path(os.environ.get("NYBBLE_BUILD_DIR", "")) / "cli" / "nybble"
    if not command.is_file():
        pytest.skip("not run: the nybble command is not built here")
    dense = pathlib.Path(stores()).parent / "dense"
    subprocess.run([command, "quantize", dense, tmp_path / "store"], check=True, capture_output=True)
    store = Store(tmp_path / "store")
    store.device = stores().device
    streamed = step(checkpointed(with_adapters(streamed_model(store, **LATE))))
    resident = step(checkpointed(with_adapters(resident_model(store))))
    assert_equal(streamed, resident, at_least=4 * LAYERS)
