"""plan_check.py without a GPU: host memory and link bytes as planned and as counted, and what a row says."""

import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "benchmarks" / "harness"))

import plan_check
from stream_store import SHAPES, write_store

TOKENS, RANK = 32, 4


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("plan_check") / "store", SHAPES["tiny"], torch.device("cpu"))


@pytest.mark.parametrize("arm", plan_check.ARMS, ids=lambda arm: str(arm[0]) + (" reentrant" if arm[1] else ""))
def test_host_memory_and_link_bytes_of_a_step_are_as_planned(store, arm):
    planned = plan_check.predict(store, TOKENS, arm, RANK)
    found = plan_check.streamed(*plan_check.training(store, TOKENS, arm, RANK, device="cpu"), steps=3)
    assert found["host"] == planned["pinned"] > 0
    assert found["link"] == planned["link"] > 0
    first = plan_check.streamed(*plan_check.training(store, TOKENS, arm, RANK, device="cpu"), steps=1)
    assert first["link"] > planned["link"]  # its forward finds no layer in a slot


def row(**wrong):
    predicted = {"allocated": 100 << 20, "reserved": 200 << 20, "pinned": 300 << 20, "link": 400 << 20}
    measured = predicted | {what: int(predicted[what] / share) for what, share in wrong.items()}
    errors = {what: predicted[what] / measured[what] - 1 for what in predicted}
    found = dict(shape="tiny", tokens=32, arm=["keep", False, "whole", "q_proj", 1], measured=measured)
    return found | dict(predicted=predicted, errors=errors, fits=plan_check.fits(errors))


@pytest.mark.parametrize("what", ["allocated", "reserved", "pinned", "link"])
@pytest.mark.parametrize("share,fits", [(1.0, True), (0.96, True), (1.09, True), (0.94, False), (1.12, False)])
def test_a_row_says_which_of_the_four_is_off(what, share, fits):
    found = row(**{what: share})
    assert found["fits"] == fits
    line = plan_check.line(found)
    assert line.count("|") == plan_check.HEAD.splitlines()[0].count("|")
    assert line.endswith("| yes |" if fits else "| NO |")
    assert f"{what} {share - 1:+.1%} to {share - 1:+.1%}" in plan_check.verdict([found])
