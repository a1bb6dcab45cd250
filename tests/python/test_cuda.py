"""What only a GPU can show: streams, threads, graphs, memory and devices."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import nybble
from nybble.gate.dispatch import plan_of
from nybble.gate.multiply import FORWARD, GRAD_INPUT, moved, multiply, random_operand, random_weight

from .conftest import has_gpu
from .reference import dequantised, quantised, relative_error
from .slots import Slot, new_uid

pytestmark = pytest.mark.skipif(not has_gpu(), reason="no GPU, or nybble was built without CUDA")

MIB = 1 << 20


def bf16(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def bits(values):
    return values.view(torch.int16)


def peak_bytes(call):
    """Device memory that a call holds at its worst, beyond what was there and what it returns."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    returned = sum(t.numel() * t.element_size() for t in (result if isinstance(result, tuple) else (result,)))
    return torch.cuda.max_memory_allocated() - before - returned


@pytest.mark.parametrize("mode", ["auto", "dequant"])
def test_work_goes_to_the_current_stream(mode):
    packed, state = quantised(256, 512, device="cuda")
    value = bf16(64, 512)
    expected = nybble.linear(value, packed, state, mode=mode)
    x = torch.full_like(value, float("nan"))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # tens of milliseconds: a launch on another stream would read the NaNs
        x.copy_(value)
        y = nybble.linear(x, packed, state, mode=mode)
    side.synchronize()
    assert torch.equal(y, expected)


def test_a_call_does_not_wait_for_the_device():
    packed, state = quantised(256, 512, device="cuda")
    x = bf16(64, 512).requires_grad_()
    grad_y = bf16(64, 256)
    torch.autograd.grad(nybble.linear(x, packed, state), x, grad_y)
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    torch.autograd.grad(nybble.linear(x, packed, state), x, grad_y)
    assert not torch.cuda.current_stream().query(), "the device finished before the call returned"
    torch.cuda.synchronize()


def test_resident_weights_are_captured_into_a_graph():
    packed, state = quantised(256, 512, device="cuda")
    x = bf16(32, 512)
    nybble.linear(x, packed, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = nybble.linear(x, packed, state)
    x.copy_(bf16(32, 512))
    y.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, nybble.linear(x, packed, state))


def test_a_streamed_weight_refuses_to_be_captured():
    packed, state = quantised(256, 512, nested=False, device="cuda")
    uid = new_uid("layer.0.captured")
    slot = Slot([packed, state.absmax])
    slot.fill(uid)
    x = bf16(32, 512)

    def multiply():
        return nybble.nf4_linear(x, packed, state.absmax, (256, 512), code=state.code, guard=uid)

    multiply()
    torch.cuda.synchronize()
    with pytest.raises(NotImplementedError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        multiply()
    slot.close()


def test_out_of_memory_is_torch_s_own_error():
    packed, state = quantised(4096, 4096, device="cuda")
    x = bf16(1, 4096).expand(200_000, 4096)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 256 * MIB) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="bytes"):
            nybble.linear(x, packed, state)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert nybble.linear(x[:4], packed, state).isfinite().all()


@pytest.mark.parametrize("direction", ["forward", "grad_input"])
def test_fp32_activations_work_in_panels_of_at_most_32_mib(direction):
    n, k, m = 8192, 4096, 8
    packed, state = quantised(n, k, dtype=torch.float32, device="cuda")
    x = torch.randn(m, k, device="cuda", requires_grad=True)
    grad_y = torch.randn(m, n, device="cuda")
    dense = dequantised(packed, state)
    with torch.no_grad():
        y = nybble.linear(x, packed, state)
    assert relative_error(y, x.detach().double() @ dense.t()) < 2**-18
    if direction == "forward":
        with torch.no_grad():
            held = peak_bytes(lambda: nybble.linear(x, packed, state))
    else:
        y = nybble.linear(x, packed, state)
        (grad,) = torch.autograd.grad(y, x, grad_y, retain_graph=True)
        assert relative_error(grad, grad_y.double() @ dense) < 2**-18
        held = peak_bytes(lambda: torch.autograd.grad(y, x, grad_y, retain_graph=True)[0])
    assert held <= 32 * MIB + 8 * m * max(n, k) * 4, f"{held / MIB:.1f} MiB"


@pytest.mark.parametrize("m", [1, 64, 512])
def test_a_fused_path_holds_no_dense_weight(m):
    packed, state = quantised(8192, 8192, device="cuda")
    x = bf16(m, 8192)
    reason = nybble.supports(x, packed, state)
    if reason is not None:
        pytest.skip(f"no fused path here: {reason}")
    held = peak_bytes(lambda: nybble.linear(x, packed, state, mode="fused"))
    assert held <= 32 * MIB + 8192 * 8192 * 2 // 32
    assert peak_bytes(lambda: nybble.linear(x, packed, state, mode="dequant")) >= 8192 * 8192 * 2


def test_fused_and_dequant_agree_within_rounding_and_say_what_ran():
    packed, state = quantised(4096, 4096, device="cuda")
    x = bf16(512, 4096)
    exact = x.double() @ dequantised(packed, state).t()
    dense = nybble.linear(x, packed, state, mode="dequant")
    nybble.reset_path_counters()
    y = nybble.linear(x, packed, state)
    ran = [path for path, counts in nybble.path_counters().items() if counts["forward"]]
    assert len(ran) == 1 and ran[0] in nybble.explain(x, packed, state)
    assert relative_error(y, exact) <= 1.05 * relative_error(dense, exact)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("direction", [FORWARD, GRAD_INPUT])
def test_batch_invariant_rows_have_the_same_bits_whatever_tile_their_number_takes(direction, dtype, nested):
    weight = random_weight(8192, 8192, torch.device("cuda"), seed=1, dtype=dtype, nested=nested)
    counts = (1, 3, 64, 65, 96, 97, 128, 129, 160, 192, 193, 256, 257, 300, 384, 512, 513, 640, 1000, 2100)
    operand = random_operand(counts[-1], weight.columns(direction)[0], torch.device("cuda"), 2, dtype)
    operand[1], operand[2] = 0, -0.0  # the sign of a sum of zeros, too
    tiles = {plan_of(weight, m, direction, True, dtype).text.partition("tiles of")[2] for m in counts}
    if "H200" in torch.cuda.get_device_name():
        assert len(tiles) >= 4, f"the numbers of rows take the tiles {tiles}, which shows little"
    rows = multiply(direction, operand, weight, batch_invariant=True)
    for m in counts:
        assert torch.equal(bits(multiply(direction, operand[:m], weight, batch_invariant=True)), bits(rows[:m])), m
    if "H200" in torch.cuda.get_device_name():  # the control: a plan that cuts the sums of the same tiles
        cut = plan_of(weight, 96, direction, dtype=dtype)
        assert cut.path == "hopper" and not cut.batch_invariant, cut.text
        assert not torch.equal(bits(multiply(direction, operand[:96], weight)), bits(rows[:96]))


def test_tensors_on_another_device_run_there_and_leave_the_current_device_alone():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    packed, state = quantised(256, 512)
    x = torch.randn(16, 512).bfloat16()
    results = []
    for index in range(2):
        device = torch.device("cuda", index)
        state.to(device)
        with torch.cuda.device(0):
            y = nybble.linear(x.to(device), packed.to(device), state)
            assert torch.cuda.current_device() == 0 and y.device == device
        results.append(y.cpu())
    assert torch.equal(*results)


class Worker:
    """Multiplies of weights of its own on one device, and what each gave while nothing else ran."""

    SHAPES = ((4096, 4096, (1, 16, 64, 300)), (1032, 1088, (4, 16, 300)))  # every fused path of compute capability 9.0
    ROUNDS = 40

    def __init__(self, index, seed):
        self.device, self.order, self.cases = torch.device("cuda", index), random.Random(seed), []
        for n, k, tokens in self.SHAPES:
            weight = random_weight(n, k, self.device, seed)
            for m in tokens:
                for direction in (FORWARD, GRAD_INPUT):
                    operand = random_operand(m, weight.columns(direction)[0], self.device, seed)
                    alone = multiply(direction, operand, weight, mode="fused")
                    torch.cuda.synchronize(self.device)
                    self.cases.append((direction, operand, weight, alone))

    def differences(self, together):
        """Elements whose bits are others while the other workers run."""
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.Stream(self.device)):
            count = torch.zeros((), dtype=torch.int64, device=self.device)
            together.wait()
            torch.cuda._sleep(50_000_000)  # tens of milliseconds: launches queue up, then run on both streams at once
            for _ in range(self.ROUNDS):
                for direction, operand, weight, alone in self.order.sample(self.cases, len(self.cases)):
                    found = multiply(direction, operand, weight, mode="fused")
                    count += (bits(found) != bits(alone)).sum()
            return int(count)


def side_by_side(workers):
    """What each worker's differences() returns, a thread each."""
    together = threading.Barrier(len(workers), timeout=60)
    with ThreadPoolExecutor(len(workers)) as pool:
        return [done.result() for done in [pool.submit(worker.differences, together) for worker in workers]]


@pytest.mark.parametrize("devices", [(0, 0), (0, 1), (0, 1, 0, 1)], ids=str)
def test_multiplies_on_streams_and_devices_side_by_side_have_the_bits_of_each_alone(devices):
    if max(devices) >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    workers = [Worker(index, seed) for seed, index in enumerate(devices)]
    before = nybble.path_counters()
    assert side_by_side(workers) == [0] * len(workers)
    ran = moved(before, nybble.path_counters())
    launches = sum(len(worker.cases) * worker.ROUNDS for worker in workers)
    assert sum(ran.values()) == launches and not any(name.startswith("dequant") for name in ran)
    if "H200" in torch.cuda.get_device_name():
        assert {name.partition(".")[0] for name in ran} == {"hopper", "small_m", "row", "portable"}


def test_a_weight_that_changes_is_seen_by_its_own_worker_only():
    workers = [Worker(0, seed) for seed in range(2)]
    workers[1].cases[0][2].packed.view(-1)[5] ^= 0x40
    torch.cuda.synchronize()
    same, other = side_by_side(workers)
    assert same == 0 and other > 0
