"""The plot of a streaming record: a bar for every timed row, none for others."""

import pathlib
import sys
import xml.etree.ElementTree

import pytest

HARNESS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks" / "harness"
sys.path.insert(0, str(HARNESS))
import plot_stream  # noqa: E402


def row(arm: str, ms: float | None, tokens: int = 512, garbage: bool = False) -> dict:
    times = {} if ms is None else dict(step_ms=ms, tok_s=1e3 * tokens / ms, rounds_ms=[ms - 1, ms, ms + 2])
    return dict(arm=arm, tokens=tokens, garbage=garbage, **times)


def record(*rows: dict) -> dict:
    return dict(machine=dict(device="A <card>"), cases=[dict(shape="8b", adapters="all", rows=list(rows))])


def bars(picture: str) -> list:
    root = xml.etree.ElementTree.fromstring(picture)
    return [element for element in root.iter() if element.tag.endswith("rect")][1:]  # without the ground


def test_every_timed_row_has_a_bar_as_long_as_its_median_and_the_kinds_differ():
    rows = [row("resident", 100), row("streamed", 50), row("no_copies", 25, garbage=True), row("peer", 80)]
    found = bars(plot_stream.svg(record(*rows, row("streamed_keep", None))))
    lengths = [float(bar.get("width")) for bar in found]
    assert lengths == sorted(lengths) and len(found) == 4
    assert lengths[0] / lengths[-1] == pytest.approx(0.25, abs=0.002)
    assert len({bar.get("fill") for bar in found}) == 4


def test_a_record_without_a_time_is_refused():
    with pytest.raises(ValueError, match="no timed row"):
        plot_stream.svg(record(row("streamed", None)))
