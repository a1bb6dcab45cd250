"""The model of the arms against its closed form and against patterns written out by hand."""

import pytest

from nybble.gate.aliasing.cells import Cell, Mode, Ring, Stack, all_cells
from nybble.gate.aliasing.patterns import Keeps, closed_form, predict

LAST, FIRST, QV, ALL = Stack.LINEAR_FILL_LAST, Stack.LINEAR_FILL_FIRST, Stack.LLAMA_QV, Stack.LLAMA_ALL
ROLLING, LATE, PROMPT = Ring.ROLLING, Ring.FIXED_HELD, Ring.FIXED_PROMPT
STOP, NO_STOP, REENTRANT = Mode.EARLY_STOP, Mode.NO_EARLY_STOP, Mode.REENTRANT
CTX, SCALES, SAVED = Keeps.ALL_ON_CTX, Keeps.SCALES_ON_CTX, Keeps.SAVED


@pytest.mark.parametrize("layers", range(6, 15))
def test_model_and_closed_form_agree_in_every_cell(layers):
    for cell in all_cells((2, 3, 4, 5)) + all_cells((2, 3), bypass=True):
        for keeps in Keeps:
            assert predict(cell, keeps, layers).wrong == closed_form(cell, keeps, layers), (cell.name, keeps)


@pytest.mark.parametrize(
    ("stack", "ring", "mode", "keeps", "slots", "expected"),
    [
        (LAST, ROLLING, STOP, CTX, 2, "XXXXXX.."),
        (LAST, ROLLING, STOP, CTX, 5, "XXX....."),
        (LAST, ROLLING, NO_STOP, CTX, 2, "XXXXXXX."),
        (LAST, ROLLING, NO_STOP, CTX, 3, "XXXXXX.."),
        (FIRST, ROLLING, STOP, CTX, 4, "XXXXXX.."),
        (FIRST, ROLLING, STOP, CTX, 5, "XXXXX..."),
        (LAST, ROLLING, STOP, SCALES, 2, "XXXXXXX."),
        (LAST, ROLLING, NO_STOP, SCALES, 5, "XXXXX..."),
        (LAST, ROLLING, REENTRANT, CTX, 2, "........"),
        (LAST, ROLLING, STOP, SAVED, 2, "........"),
        (QV, LATE, STOP, CTX, 2, "XXXXXX.."),
        (QV, LATE, NO_STOP, CTX, 4, "XXXX...."),
        (QV, PROMPT, STOP, CTX, 2, "........"),
        (ALL, LATE, STOP, CTX, 2, "........"),
        (QV, LATE, STOP, SCALES, 2, "........"),
    ],
)
def test_pattern_written_out_by_hand(stack, ring, mode, keeps, slots, expected):
    wrong = predict(Cell(stack, ring, mode, slots), keeps, 8).wrong
    assert "".join("X" if i in wrong else "." for i in range(8)) == expected


def test_a_wrong_layer_is_always_a_stale_read():
    patterns = [predict(cell, keeps, 8) for cell in all_cells((2, 3, 4, 5)) for keeps in Keeps]
    assert any(p.wrong for p in patterns)
    assert all(p.stale for p in patterns if p.wrong)


def test_a_read_that_is_right_by_luck_is_stale_too():
    pattern = predict(Cell(QV, PROMPT, STOP, 2), CTX, 8)
    assert not pattern.wrong and pattern.stale


def test_nothing_is_stale_when_everything_is_saved_or_nothing_recycled():
    assert not any(predict(cell, SAVED, 8).stale for cell in all_cells((2, 3, 4, 5)))
    assert not any(predict(cell, keeps, 8).stale for cell in all_cells((2,), bypass=True) for keeps in Keeps)
