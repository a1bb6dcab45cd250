"""The model of docs/portable.md: its table is what the constants give, and its terms are those of its first lines."""

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks" / "harness"))
import portable_model as model  # noqa: E402


def test_the_table_of_the_docs_is_the_models():
    assert model.table() in (ROOT / "docs" / "portable.md").read_text()


@pytest.mark.parametrize("card", [*model.CARDS, model.SLOW_H200], ids=lambda card: card.name)
def test_a_ratio_is_that_of_the_times(card):
    n, k, m = 14336, 4096, 512
    dequant = (0.5 + 2 + 1 / 64 + 4 / (64 * 256)) * n * k / (0.85 * card.terabytes * 1e12)
    dense = 2 * m * n * k / (0.9 * card.tflops * 1e12)
    assert card.ratio(m) == pytest.approx(card.fused * dense / (dequant + dense), rel=1e-12)
    assert card.tokens / m == pytest.approx(dequant / dense, rel=1e-12)


def test_the_slowed_h200_issues_one_mma_in_30_clocks():
    assert model.SLOW_H200.tflops == pytest.approx(142.7, abs=0.1)
    assert model.SLOW_H200.fused == model.CARDS[0].fused
    predicted = [model.SLOW_H200.ratio(m) for m in (512, 1024, 2048)]
    assert predicted == pytest.approx([0.9468, 0.9820, 1.0006], abs=1e-4)
