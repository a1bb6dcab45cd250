"""What a patched model shows to others: names, files, copies, hooks; patching again; unpatch."""

import contextlib
import copy
import io
import pickletools
import zipfile

import accelerate
import bitsandbytes as bnb
import peft
import pytest
import safetensors.torch
import torch

import nybble
from nybble.patching.modules import Patched
from nybble.patching.report import reason_in_words

from .models import LINEARS, assert_same, batch, linears, load, prepared, qlora, spoil, step, train, with_adapters


def test_patching_again_changes_nothing(dense):
    model = qlora(dense())
    first = nybble.patch(model, mode="dequant")
    classes = [type(module) for module in model.modules()]
    second = nybble.patch(model, mode="dequant")
    assert (first.changed, second.changed) == (LINEARS, 0)
    assert first.modules == second.modules
    assert str(second).startswith(
        f"nybble patched 0 of {LINEARS} 4-bit modules, mode 'dequant' ({LINEARS} were patched"
    )
    assert classes == [type(module) for module in model.modules()]


def test_unpatch_restores(dense):
    plain, model = qlora(dense()), qlora(dense(), mode="auto")
    assert nybble.unpatch(model) == LINEARS
    assert nybble.unpatch(model) == 0
    assert {type(module) for module in linears(model).values()} == {bnb.nn.Linear4bit}
    assert [vars(module).keys() for module in model.modules()] == [vars(module).keys() for module in plain.modules()]
    nybble.reset_path_counters()
    assert_same(step(model, batch()), step(plain, batch()), at_least=29)
    assert not any(count for path in nybble.path_counters().values() for count in path.values())


def test_names_repr_and_parameters_stay(dense):
    plain, model = qlora(dense()), qlora(dense(), mode="auto")
    assert repr(model) == repr(plain)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    for (name, ours), (other, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other and type(ours) is type(theirs) and ours.requires_grad == theirs.requires_grad
    assert model.get_memory_footprint() == plain.get_memory_footprint()


def asked(model, monkeypatch) -> list[str]:
    """Functions that a step asks Params4bit's Python code about."""
    seen, real = [], bnb.nn.Params4bit.__torch_function__.__func__

    def ask(cls, func, types, args=(), kwargs=None):
        seen.append(str(func))
        return real(cls, func, types, args, kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(bnb.nn.Params4bit, "__torch_function__", classmethod(ask))
        step(model, batch())
    return seen


def test_a_patched_multiply_runs_no_python_of_the_parameters_class(dense, monkeypatch):
    model = qlora(dense(), mode="auto")
    assert not [name for name in asked(model, monkeypatch) if "nybble" in name or "linear" in name]
    monkeypatch.setattr(torch._C, "DisableTorchFunctionSubclass", contextlib.nullcontext)
    assert len([name for name in asked(model, monkeypatch) if "nybble.linear_4bit" in name]) >= LINEARS


def read(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_saved_files_are_those_of_an_unpatched_model(dense, tmp_path):
    files = {}
    for mode in (None, "auto"):
        model = load(dense("Qwen2"))
        if mode:
            nybble.patch(model, mode=mode)
        model.save_pretrained(tmp_path / f"base {mode}")
        adapted = with_adapters(prepared(model))
        adapted.save_pretrained(tmp_path / f"adapter {mode}")
        torch.save(adapted.state_dict(), tmp_path / "state.pt")
        files[mode] = [read(tmp_path / f"base {mode}"), read(tmp_path / f"adapter {mode}")]
        files[mode].append(torch.load(tmp_path / "state.pt"))
    (base, adapter, state), (other_base, other_adapter, other_state) = files.values()
    assert base == other_base and len(base["model.safetensors"]) > 50_000
    assert adapter == other_adapter and "adapter_model.safetensors" in adapter
    assert list(state) == list(other_state) and all(torch.equal(state[key], other_state[key]) for key in state)
    spoil(model)  # the control: a file of other weights differs
    model.save_pretrained(tmp_path / "spoiled")
    assert read(tmp_path / "spoiled")["model.safetensors"] != base["model.safetensors"]


def test_bias_and_norms_keep_their_dtype_in_files(dense):
    model = qlora(dense("Qwen2"), mode="auto")
    before = {name: (p.dtype, p.data_ptr()) for name, p in model.named_parameters()}
    step(model, batch())
    assert {name: (p.dtype, p.data_ptr()) for name, p in model.named_parameters()} == before
    assert sum(dtype == torch.float32 for name, (dtype, _) in before.items() if name.endswith("bias")) == 6


def test_a_pickled_module_needs_no_nybble(dense):
    module = next(iter(linears(qlora(dense(), mode="auto")).values()))
    file = io.BytesIO()
    torch.save(module, file)
    with zipfile.ZipFile(file) as archive:
        text = "".join(str(argument) for _, argument, _ in pickletools.genops(archive.read("archive/data.pkl")))
    assert "bitsandbytes" in text and "nybble" not in text
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is bnb.nn.Linear4bit
    assert torch.equal(loaded.weight.data, module.weight.data)


def test_a_deep_copy_is_patched_and_independent(dense):
    model = qlora(dense(), mode="dequant")
    expected = step(model, batch())
    twin = copy.deepcopy(model)
    spoil(model)
    assert all(type(module) is type(linears(model)[name]) for name, module in linears(twin).items())
    assert_same(step(twin, batch()), expected, at_least=29)
    nybble.unpatch(model)
    assert all(isinstance(module, Patched) for module in linears(twin).values())


def test_adapters_save_load_and_train_on(dense, tmp_path):
    model = qlora(dense(), mode="dequant")
    train(model)
    model.save_pretrained(tmp_path)
    assert len(safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")) == 2 * LINEARS
    results = []
    for mode in (None, "dequant"):
        base = prepared(load(dense()), False)
        if mode:
            nybble.patch(base, mode=mode)
        results.append(step(peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=True).train(), batch()))
    assert_same(results[1], results[0], at_least=29)
    assert_same(step(model, batch()), results[0], at_least=29)


def upstream_rewrites_the_state() -> bool:
    """bitsandbytes before 0.50 writes the dtype of x into quant_state.dtype in every forward on a CPU."""
    module = bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16).to("cpu")
    before = module.weight.quant_state.dtype
    module(torch.zeros(2, 64))
    return module.weight.quant_state.dtype != before


def test_merge_and_unmerge_equal_an_unpatched_model(dense):
    rewrites = upstream_rewrites_the_state()

    def logits_of(model, mode):
        logits = model(input_ids=batch()).logits
        if mode and rewrites:  # PEFT merges and unmerges in the dtype of the state
            for module in linears(model).values():
                module.weight.quant_state.dtype = module.compute_dtype
        return logits

    results = []
    for mode in (None, "dequant"):
        model = qlora(dense(), mode=mode).eval()
        with torch.no_grad():
            start = logits_of(model, mode)
            model.merge_adapter()
            folded = logits_of(model, mode)
            model.unmerge_adapter()
            unfolded = logits_of(model, mode)
            whole = model.merge_and_unload()
            results.append((start, folded, unfolded, logits_of(whole, mode)))
            if mode:
                assert all(isinstance(module, Patched) for module in linears(whole).values())
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert not torch.equal(results[0][0], results[0][1])


@pytest.mark.parametrize("hooked_first", [True, False])
def test_modules_with_accelerate_hooks(dense, hooked_first):
    """A hook keeps the class's forward as a bound method; patch and unpatch reach it, and so does its removal."""
    model = qlora(dense())
    expected = step(model, batch())
    modules = list(linears(model).values())

    def hook():
        for module in modules:
            accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())

    if hooked_first:
        hook()
    assert nybble.patch(model, mode="dequant").changed == LINEARS
    if not hooked_first:
        hook()
    nybble.reset_path_counters()
    assert_same(step(model, batch()), expected, at_least=29)
    assert nybble.path_counters()["dequant"]["forward"] == 2 * LINEARS
    for module in modules:
        accelerate.hooks.remove_hook_from_module(module)
    nybble.reset_path_counters()
    assert_same(step(model, batch()), expected, at_least=29)
    assert nybble.path_counters()["dequant"]["forward"] == 2 * LINEARS
    assert nybble.patch(model, mode="dequant").changed == 0
    assert nybble.unpatch(model) == LINEARS
    nybble.reset_path_counters()
    assert_same(step(model, batch()), expected, at_least=29)
    assert nybble.path_counters()["dequant"]["forward"] == 0


def test_the_report_reads_as_a_table(dense):
    model = load(dense())
    report = nybble.patch(model, mode="dequant")
    assert str(report) == (
        f"nybble patched {LINEARS} of {LINEARS} 4-bit modules, mode 'dequant'\n"
        f'     {LINEARS} dequant   model.layers.0.self_attn.q_proj, ...: mode="dequant" was asked for'
    )
    entry = report["model.layers.1.mlp.down_proj"]
    assert (entry.shape, entry.compute_dtype, entry.path) == ((64, 192), torch.bfloat16, "dequant")
    with pytest.raises(KeyError, match="no_such"):
        report["no_such"]


def test_reasons_say_what_to_do():
    plan = "fp32 activations have no fused kernel"
    assert reason_in_words(plan, torch.float32) == (
        "compute dtype float32 keeps this module off the fused path; set bnb_4bit_compute_dtype=torch.bfloat16 "
        "in BitsAndBytesConfig"
    )
    assert reason_in_words("block size 4096", torch.bfloat16) == "block size 4096"


def test_on_a_gpu_float32_is_reported_and_fused_mode_refuses_it(dense, device):
    model = load(dense(), torch.float32, device)
    report = nybble.patch(model)
    if device.type == "cpu":
        assert {module.path for module in report.modules} == {"fused"}
        return
    assert {module.path for module in report.modules} == {"dequant"}
    assert "set bnb_4bit_compute_dtype=torch.bfloat16" in str(report)
    nybble.unpatch(model)
    with pytest.raises(NotImplementedError, match=f'mode="fused", but {LINEARS} of {LINEARS} modules'):
        nybble.patch(model, mode="fused")
    assert not any(isinstance(module, Patched) for module in model.modules())


def test_a_compute_dtype_that_is_not_set_yet_is_taken_from_the_first_input(device):
    module = bnb.nn.Linear4bit(64, 32, quant_type="nf4").to(device)
    report = nybble.patch(module)
    assert report[""].compute_dtype is None
    x = torch.randn(3, 64, device=device)
    y = module(x)
    assert y.dtype == torch.float32 and module.compute_dtype == torch.float32 and module.compute_type_is_set
    assert nybble.unpatch(module) == 1
    assert torch.allclose(y, module(x), atol=1e-5)


@pytest.mark.parametrize("kind", ["fp4", "LinearFP4", "LinearNF4", "bfloat16 storage", "plain scales"])
def test_every_kind_of_4_bit_module(kind, device):
    options = {"compute_dtype": torch.bfloat16, "compress_statistics": kind != "plain scales"}
    if kind == "bfloat16 storage":
        options["quant_storage"] = torch.bfloat16
    if kind in ("LinearFP4", "LinearNF4"):
        module = getattr(bnb.nn, kind)(64, 32, **options).to(device)
    else:
        module = bnb.nn.Linear4bit(64, 32, quant_type="fp4" if kind == "fp4" else "nf4", **options).to(device)
    base = type(module)
    for shape in ((5, 64), (64,), (2, 3, 64), (0, 64)):
        x = torch.randn(shape, dtype=torch.float16, device=device)
        expected = module(x)
        nybble.patch(module, mode="dequant")
        found = module(x)
        assert found.dtype == torch.float16 and found.shape == expected.shape
        if device.type == "cpu":
            assert torch.equal(found, expected), shape
        nybble.unpatch(module)
        assert type(module) is base
