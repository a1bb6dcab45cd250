"""What cannot be patched is an error that names the module, before anything is changed; or it is right."""

import threading

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes.functional import _convert_weight_packed_for_cpu

import nybble
from nybble.patching.modules import Patched

from .models import LINEARS, assert_same, batch, linears, load, qlora, step

Q = "model.layers.1.self_attn.q_proj"


def on_meta(model):
    module = model.get_submodule(Q)
    module.weight = bnb.nn.Params4bit(torch.empty(2048, 1, dtype=torch.uint8, device="meta"), bnb_quantized=True)


def without_state(model):
    model.get_submodule(Q).weight.quant_state = model.get_submodule(Q).quant_state = None


def still_dense(model):
    model.get_submodule(Q).weight = bnb.nn.Params4bit(torch.ones(64, 64))
    model.get_submodule(Q).quant_state = None


def repacked_for_inference(model):
    """As an evaluation leaves it on CPUs with AVX512-BF16."""
    weight = model.get_submodule(Q).weight
    weight.data, _ = _convert_weight_packed_for_cpu(weight.data, weight.quant_state)


def rounded_scales(model):
    """As bitsandbytes leaves plain scales when it undoes its inference layout."""
    state = model.get_submodule(Q).weight.quant_state
    state.absmax, state.state2, state.nested = torch.ones(64, dtype=torch.bfloat16), None, False


def half_on_meta(model):
    for name, module in linears(model).items():
        if ".layers.1." in name:
            module.weight = bnb.nn.Params4bit(torch.empty_like(module.weight, device="meta"), bnb_quantized=True)


def moved_weight(model):
    """The weight alone on another device: what assigning `weight.data` does, where .to(device) moves both."""
    weight = model.get_submodule(Q).weight
    state = weight.quant_state
    for holder in (state, state.state2):
        for part in ("absmax", "code", "offset"):
            if isinstance(getattr(holder, part, None), torch.Tensor):
                setattr(holder, part, getattr(holder, part).to("meta"))


def state_elsewhere(model):
    model.get_submodule(Q).weight.quant_state.absmax = torch.empty(64, dtype=torch.uint8, device="meta")


def offset_elsewhere(model):
    model.get_submodule(Q).weight.quant_state.offset = torch.empty((), device="meta")


def state_of_another(model):
    module = model.get_submodule(Q)
    module.weight.quant_state = model.get_submodule(Q.replace("q_proj", "k_proj")).weight.quant_state


def cut_weight(model):
    module = model.get_submodule(Q)
    module.weight.data = module.weight.data[:100]


def transposed(model):
    state = model.get_submodule("model.layers.1.mlp.up_proj").weight.quant_state
    state.shape = torch.Size((64, 192))


FAULTS = [
    (on_meta, Q, "meta device.*load the model"),
    (without_state, Q, "no quant_state.*load the model again"),
    (still_dense, Q, "still dense.*moves to a device"),
    (repacked_for_inference, Q, "CPU inference layout.*load the model again"),
    (rounded_scales, Q, "absmax is torch.bfloat16, expected torch.float32.*load the model again"),
    (half_on_meta, Q, "meta device.*load the model"),
    (moved_weight, Q, r"quant_state\.absmax is on meta, the weight on cpu"),
    (state_elsewhere, Q, r"quant_state\.absmax is on meta, the weight on cpu.*\.to\(device\)"),
    (offset_elsewhere, Q, r"quant_state\.offset is on meta"),
    (state_of_another, Q, r"quant_state\.shape is \[32, 64\], expected \[64, 64\]"),
    (cut_weight, Q, "100 bytes, expected 2048"),
    (transposed, "model.layers.1.mlp.up_proj", r"shape is \[64, 192\], expected \[192, 64\]"),
]


@pytest.mark.parametrize(("spoil", "name", "words"), FAULTS)
def test_one_bad_module_is_named_and_nothing_is_patched(dense, spoil, name, words):
    model = load(dense())
    spoil(model)
    with pytest.raises(ValueError, match=f"(?s){name}: .*{words}"):
        nybble.patch(model)
    assert not any(isinstance(module, Patched) for module in model.modules())


def test_nothing_to_patch_says_what_was_looked_for_and_found():
    with pytest.raises(ValueError, match=r"Linear4bit.*found 2 Linear; load the model with quantization_config"):
        nybble.patch(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    with pytest.raises(ValueError, match="no linear at all"):
        nybble.patch(torch.nn.LayerNorm(4))
    with pytest.raises(ValueError, match="found 1 Linear8bitLt; 8-bit modules are not supported"):
        nybble.patch(torch.nn.Sequential(bnb.nn.Linear8bitLt(64, 64)))


def test_8_bit_modules_beside_4_bit_ones_stay_as_they_are(dense):
    model = load(dense())
    model.extra = bnb.nn.Linear8bitLt(64, 64)
    assert len(nybble.patch(model).modules) == LINEARS
    assert type(model.extra) is bnb.nn.Linear8bitLt


@pytest.mark.parametrize("model", [None, "gpt2", [torch.nn.Linear(4, 4)]])
def test_what_is_no_module_is_a_type_error(model):
    for call in (nybble.patch, nybble.unpatch):
        with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
            call(model)


def test_an_unknown_mode_is_an_error(dense):
    with pytest.raises(ValueError, match="mode is 'fast', expected one of auto, fused, dequant"):
        nybble.patch(load(dense()), mode="fast")


def test_another_mode_asks_for_unpatch_first(dense):
    model = load(dense())
    nybble.patch(model, mode="dequant")
    with pytest.raises(ValueError, match=r"patched with mode 'dequant', asked for 'auto'; call nybble\.unpatch"):
        nybble.patch(model)
    assert {module.nybble_mode for module in linears(model).values()} == {"dequant"}
    nybble.unpatch(model)
    assert nybble.patch(model).changed == LINEARS


def test_modules_with_a_forward_of_their_own_are_listed_and_left_alone(dense):
    class Other(bnb.nn.Linear4bit):
        def forward(self, x):
            return x

    model = load(dense())
    ours, theirs = list(linears(model).values())[:2]
    ours.forward = lambda x: x
    theirs.__class__ = Other
    report = nybble.patch(model)
    assert report.changed == LINEARS - 2
    reasons = [module.reason for module in report.modules if module.path == "unpatched"]
    assert reasons == [f"something set forward on this module ({__name__})", "class Other has a forward of its own"]
    assert type(theirs) is Other and type(ours) is bnb.nn.Linear4bit


def test_streamed_modules_are_skipped(dense):
    model = load(dense())
    first = next(iter(linears(model).values()))
    first.nybble_streamed = True
    report = nybble.patch(model)
    assert report.modules[0].path == "unpatched" and report.modules[0].reason.startswith("streamed")
    for module in linears(model).values():
        module.nybble_streamed = True
    nybble.unpatch(model)
    with pytest.raises(ValueError, match=f"all {LINEARS} stay as they are: streamed"):
        nybble.patch(model)


def test_the_state_is_found_on_the_module_when_the_parameter_lost_it(dense):
    expected = step(qlora(dense()), batch())
    model = qlora(dense(), mode="dequant")
    for module in linears(model).values():
        module.weight = torch.nn.Parameter(module.weight.data, requires_grad=False)  # what FSDP leaves
    assert_same(step(model, batch()), expected, at_least=29)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_patching_under_any_grad_mode(dense, context):
    expected = step(qlora(dense()), batch())
    model = qlora(dense())
    with context():
        nybble.patch(model, mode="dequant")
    assert_same(step(model, batch()), expected, at_least=29)


def test_patching_in_two_threads_patches_once(dense):
    model = qlora(dense())
    reports = []
    threads = [threading.Thread(target=lambda: reports.append(nybble.patch(model))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(report.changed for report in reports) == [0, 0, 0, LINEARS]
    assert all(isinstance(module, Patched) for module in linears(model).values())


def test_the_ops_name_the_inference_layout_too(dense):
    model = load(dense())
    repacked_for_inference(model)
    weight = model.get_submodule(Q).weight
    with pytest.raises(ValueError, match=r"CPU inference layout.*load the model again"):
        nybble.linear(torch.randn(3, 64), weight, weight.quant_state)


def test_an_evaluation_before_patch_is_recognised(dense):
    model = load(dense()).eval()
    module = model.get_submodule(Q)
    if not module.support_avx512bf16_for_cpu:
        pytest.skip("bitsandbytes repacks only on CPUs with AVX512-BF16")
    with torch.no_grad():
        model(input_ids=batch())
    with pytest.raises(ValueError, match="CPU inference layout"):
        nybble.patch(model)
