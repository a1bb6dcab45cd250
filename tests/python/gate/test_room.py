"""Gates on small cards: what fits into the memory that is free, and what is named as left out. No card is needed: the
free memory is made up.
"""

import dataclasses
import json
import types
from pathlib import Path

import pytest
import torch

from nybble.gate import dispatch, room
from nybble.gate.__main__ import main
from nybble.gate.aliasing.gate import AliasingGate
from nybble.gate.aliasing.stacks import Sizes as StackSizes
from nybble.gate.aliasing.workers import CONTEXT_BYTES, count_that_fits
from nybble.gate.equality import command as equality
from nybble.gate.memory.command import SIZES as MEMORY_SIZES
from nybble.gate.memory.gate import MemoryGate, ModelCell
from nybble.gate.race import sizes as race
from nybble.gate.training import timed_command
from nybble.gate.training.needs import missing

GIB, MIB = 1 << 30, 1 << 20
RECORDS = Path(__file__).parents[3] / "benchmarks/records"
trains = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture
def free(monkeypatch):
    """Sets what a card has free."""
    return lambda count: monkeypatch.setattr(room, "available", lambda device: count)


@pytest.mark.parametrize(
    ("free_bytes", "share", "reserved", "allocated", "expected"),
    [
        (70, 1.0, 20, 15, 75),  # free, and cached but not given out
        (70, 0.5, 20, 15, 35),  # the rest of this process's share
        (5, 0.5, 20, 20, 5),  # other processes have the rest
        (70, 0.1, 20, 15, 0),
    ],
)
def test_available_is_what_is_free_or_what_the_share_leaves(
    monkeypatch, free_bytes, share, reserved, allocated, expected
):
    for name, value in {
        "mem_get_info": (free_bytes, 100),
        "memory_reserved": reserved,
        "memory_allocated": allocated,
        "get_per_process_memory_fraction": share,
        "current_device": 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
    assert room.available(torch.device("cuda")) == room.available(torch.device("cuda", 0)) == expected
    assert room.available(torch.device("cpu")) is None


def test_cells_that_do_not_fit_are_named_with_the_figures():
    cells = [types.SimpleNamespace(name=f"{mib} MiB", need=mib * MIB) for mib in (100, 1000, 5000)]
    kept, left_out = room.fitting(cells, lambda cell: cell.need, 2 * GIB)
    assert [cell.name for cell in kept] == ["100 MiB", "1000 MiB"]
    assert left_out == {"5000 MiB": "needs about 5756 MiB, 2048 MiB are free"}
    assert room.fitting(cells, lambda cell: cell.need, None) == (cells, {})


@pytest.mark.parametrize(("full", "gib", "lost"), [(False, 8, 0), (True, 8, 0), (False, 2, 0), (True, 2, 13)])
def test_memory_gate(free, full, gib, lost):
    free(None)
    sizes = MEMORY_SIZES["cuda", full]
    every = MemoryGate("cuda", sizes)
    free(gib * GIB)
    gate = MemoryGate("cuda", sizes)
    assert {type(cell) for cell in gate.cells} >= {type(cell) for cell in every.cells[:1]}
    assert len(gate.cells) == len(every.cells) - lost and every.left_out.keys() <= gate.left_out.keys()
    names = {cell.name for cell in every.cells} - {cell.name for cell in gate.cells}
    assert names == gate.left_out.keys() - every.left_out.keys()
    assert all(f"{gib << 10} MiB are free" in gate.left_out[name] for name in names)


@trains
def test_estimates_of_the_memory_gate_are_above_the_peaks_of_a_record(free):
    free(None)
    rows = json.loads((RECORDS / "h200-gate-memory.json").read_text())["results"]
    gate = MemoryGate("cuda", MEMORY_SIZES["cuda", True])
    cells = [cell for cell in map(model_cell, {row["cell"] for row in rows}) if cell is not None]
    assert len(cells) >= 3
    for cell in cells:
        peak = max(row["values"]["peak_bytes"] for row in rows if row["cell"] == cell.name)
        assert peak < gate.need(cell) < 2.5 * peak, cell.name


def model_cell(name: str):
    """The cell of a row's name; None for other kinds."""
    words = name.replace(",", "").split()
    if words[0] != "Llama":
        return None
    shape = dataclasses.replace(MEMORY_SIZES["cuda", True].model, layers=int(words[2]))
    return ModelCell(shape, int(words[-1]))


@pytest.mark.parametrize(
    ("full", "gib", "hidden", "windows", "left_out"),
    [
        (False, 2, 1024, (2, 3), set()),
        (True, 8, 4096, (2, 3, 4), set()),
        (True, 3, 4096, (2,), {"window 3", "window 4"}),
        (True, 2, 1024, (2, 3), {"layers of hidden size 4096"}),
        (True, 0.1, 1024, (), {"layers of hidden size 4096", "layers of hidden size 1024"}),
    ],
)
def test_equality_takes_the_largest_sizes_that_fit(full, gib, hidden, windows, left_out):
    shape, _, kept, out = equality.sizes_that_fit("cuda", full, int(gib * GIB))
    assert (shape.hidden, kept, set(out)) == (hidden, windows, left_out)


def test_race_leaves_out_the_largest_layers_first():
    row, grid, out = race.sizes_that_fit("cuda", True, 8 * GIB)
    assert (row, grid, out) == (race.SHAPES["cuda", True], race.GRIDS["cuda", True], {})
    row, grid, out = race.sizes_that_fit("cuda", True, GIB)
    assert row == race.SHAPES["cuda", True] and 0 < len(grid) < 4 and "layer size 2048 x 6144" in out
    row, grid, out = race.sizes_that_fit("cuda", True, 300 * MIB)
    assert row == race.SHAPES["cuda", False] and "layers of hidden size 1024" in out
    assert race.sizes_that_fit("cuda", True, MIB)[0][0] is None


@trains
@pytest.mark.parametrize(
    ("full", "gib", "names", "left_out"),
    [
        (False, 2, ["small", "wide"], set()),
        (True, 8, ["8b", "32b"], {"tokens 1024", "tokens 4096"}),
        (True, 40, ["8b", "32b"], {"policy keep, tokens 4096"}),
        (True, 139, ["8b", "32b"], set()),
        (True, 2, ["small", "wide"], {"shape 8b", "shape 32b"}),
        (True, 0.1, None, {"shape 8b", "shape 32b", "shape small", "shape wide"}),
    ],
)
def test_exact_covers_every_pair_that_fits(full, gib, names, left_out):
    from nybble.gate.exact import cells, command, covering

    free = int(gib * GIB)
    sizes, out = command.sizes_that_fit("cuda", full, free)
    if sizes is None:
        assert names is None and set(out) == left_out
        return
    kept = cells.cells_of(sizes, free)
    assert list(sizes.shapes) == names and all(room.fits(cells.bytes_of(cell, sizes), free) for cell in kept)
    assert {cell.shape for cell in kept if cell.late} == set(names)
    wanted = covering.all_pairs(cells.factors(sizes), cells.fits(sizes, free))
    held = [{k: v for k, v in vars(cell).items() if k != "late"} for cell in kept if not cell.late]
    assert set().union(*map(covering.pairs_of, held)) == wanted
    assert set(out | cells.left_out(sizes, free)) == left_out


def test_aliasing_takes_as_many_processes_as_fit():
    gate = AliasingGate(device="cpu", slots=(2,), sizes=StackSizes(layers=4, dim=6144))
    need = max(map(gate.need, gate.cells))
    assert 4 * 2 * 10 * 6144**2 < need < 8 * GIB
    assert room.fitting(gate.cells, gate.need, 8 * GIB)[0] == gate.cells
    kept, left_out = room.fitting(gate.cells, gate.need, 2 * GIB)
    assert {cell.is_llama for cell in kept} == {False} and len(kept) + len(left_out) == len(gate.cells)
    assert count_that_fits(8, need, 8 * GIB) == 1 and count_that_fits(8, need, None) == 8
    assert count_that_fits(8, need, int(3.5 * (need * room.MARGIN + room.FIXED_BYTES + CONTEXT_BYTES))) == 3
    small = max(map(AliasingGate(device="cpu", slots=(2,)).need, gate.cells))
    assert count_that_fits(8, small, 8 * GIB) == 8


def test_numerics_and_determinism_leave_out_shapes_and_rows(free):
    free(2 * GIB)
    left_out = {}
    shapes = dispatch.shapes_that_fit(torch.device("cuda"), ((4096, 4096), (28672, 8192)), 17, left_out)
    assert shapes == [(4096, 4096)] and "beside the operands" in left_out["28672x8192"]
    assert dispatch.largest_that_fits(torch.device("cuda"), 4096, 4096, 16384, left_out) == 8192
    assert "4096x4096, M above 8192" in left_out


@pytest.mark.parametrize(
    ("gib", "hidden", "tokens", "left_out"),
    [
        (139, 4096, (1024, 16384), set()),
        (7.6, 4096, (1024, 8192), {"16384 tokens, hidden size 4096"}),
        (
            3,
            2048,
            (1024, 8192),
            {f"{m} tokens, hidden size {n}" for m, n in ((1024, 4096), (16384, 4096), (16384, 2048))},
        ),
        (0.5, 4096, (), {f"{m} tokens, hidden size {n}" for m in (1024, 16384) for n in (4096, 2048)}),
    ],
)
def test_timed_gates_halve_the_tokens_then_take_smaller_layers(free, gib, hidden, tokens, left_out):
    free(int(gib * GIB))
    sizes, out = timed_command.fitting(timed_command.SIZES["cuda", False], "cuda")
    assert (sizes.shape.hidden, sizes.tokens, set(out)) == (hidden, tokens, left_out)
    assert all(f"{int(gib * 1024)} MiB are free" in why for why in out.values())


@pytest.mark.parametrize("name", ["share", "speed"])
def test_estimates_of_timed_gates_are_above_the_peaks_of_a_record(name):
    record = json.loads((RECORDS / f"h200-gate-{name}.json").read_text())
    shape = timed_command.LLAMA_8B_LAYERS
    assert record["findings"]["shape"]["hidden"] == shape.hidden
    peaks = {int(row["cell"].split()[0]): row["values"]["peak_bytes"] for row in record["results"] if row["values"]}
    assert peaks
    for tokens, peak in peaks.items():
        whole = peak + (2 * shape.weights if name == "share" else 0)
        assert whole < timed_command.bytes_of(shape, tokens) < 2.5 * whole


@trains
def test_timed_gates_say_when_nothing_fits(free, capsys, monkeypatch):
    free(MIB)
    for name in ("share", "speed"):
        assert main([name, "--device", "cpu"]) == 3
        assert "16 tokens, hidden size 64 (needs about" in capsys.readouterr().out


@trains
def test_a_gate_says_what_it_left_out_and_still_has_a_verdict(free, capsys):
    from nybble.gate.exact import cells, command

    sizes = command.sizes_of("cpu", False)
    needs = sorted({cells.bytes_of(cell, sizes) for cell in cells.cells_of(sizes)})
    enough = int(needs[len(needs) // 2] * room.MARGIN + room.FIXED_BYTES)
    lost = cells.left_out(sizes, enough)
    free(enough)
    assert main(["exact", "--device", "cpu", "--repeats", "1"]) == 0
    text = capsys.readouterr().out
    assert "every pair that fits occurs in a cell" in text
    assert lost and all(f"{name} ({why})" in text for name, why in lost.items())


@trains
def test_nothing_that_fits_is_no_verdict(free, capsys):
    free(MIB)
    for name in ("equality", "exact", "race"):
        assert main([name, "--device", "cpu"]) == 3
        assert "1 MiB are free" in capsys.readouterr().out


@trains
@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_the_estimate_of_a_step_is_above_its_measured_peak(policy):
    from nybble.gate.exact.models import ShapeModels, set_policy
    from nybble.gate.memory.peaks import Account
    from nybble.gate.runner import one_thread
    from nybble.gate.training import footprint
    from nybble.gate.training.outcome import step_outcome
    from nybble.gate.training.store import Shape

    shape, rows, length, device = Shape(128, 352, 4, 4, 2, 256), 2, 96, torch.device("cpu")
    with one_thread(), Account(device) as whole:
        models = ShapeModels(shape, {2: {"window": 2}}, device, 0)
        models.adapt("all")
        built = whole.peak()
        for model in (models.resident, models.streamed[2]):
            set_policy(model, policy if model is not models.resident else "recompute")
            with Account(device) as account:
                outcome = step_outcome(model, torch.randint(0, shape.vocab, (rows, length)))
                step = account.peak()
            keep = policy == "keep" and model is not models.resident
            assert outcome.raised is None
            assert step < footprint.step_bytes(shape, rows, length, keep=keep) < 2 * step
    assert built > 0
    models.close()
