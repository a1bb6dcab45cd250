"""On a card: the rates that a plan is not told are measured there, and say so."""

import time

import pytest
import torch

import nybble
from nybble.planning import rates


@pytest.fixture(autouse=True)
def no_card():
    """Here the machine's card is what it is about."""
    if rates.card() is None:
        pytest.skip("no GPU, or nybble was built without CUDA")


def test_rates_are_measured_in_a_moment_and_are_those_of_a_card():
    start, before = time.perf_counter(), torch.cuda.memory_allocated()
    found = rates.rates(dict.fromkeys(rates.ASSUMED), 2048, (4096, 4096))
    assert time.perf_counter() - start < 20  # the first use of cuBLAS included
    assert set(found.origin.values()) == {"measured"}
    # From PCIe of the third generation on 4 lanes and the smallest cards to what no card reaches yet.
    assert 1 < found.link_gb_s < 1000 and 5 < found.gemm_tflops < 10_000 and 50 < found.memory_gb_s < 50_000
    assert found.link_gb_s < found.memory_gb_s and torch.cuda.memory_allocated() - before < 64 << 20
    given = rates.rates({"link_gb_s": 3.0, "gemm_tflops": None, "memory_gb_s": None}, 2048, (4096, 4096))
    assert given.link_gb_s == 3.0 and given.origin["link_gb_s"] == "given" and given.origin["gemm_tflops"] == "measured"


def test_a_plan_names_its_bound_by_the_rates_of_the_card(folder):
    plan = nybble.plan_training(folder(), tokens=256, rank=8)
    text = str(plan)
    assert text.count("(measured)") == 2 and "(assumed)" not in text
    assert plan.speed.link_s == pytest.approx(plan.speed.link_bytes / plan.machine.rates.link_gb_s / 1e9)
    assert plan.speed.bound == ("link" if plan.speed.link_s > plan.speed.compute_s else "compute")
    assert plan.machine.context_origin.startswith("measured")
