"""Figures in the pages and plots beside the records are what the records say."""

import json
import pathlib
import sys
import xml.etree.ElementTree

import pytest

HARNESS = pathlib.Path(__file__).parents[3] / "benchmarks" / "harness"
sys.path.insert(0, str(HARNESS))
import figures  # noqa: E402
import plot_gates  # noqa: E402


def test_every_figure_and_plot_is_what_its_record_says():
    wrong = [line for path, text in figures.stale().items() for line in figures.differences(path, text)]
    assert wrong == []


def test_the_readme_has_figures_and_every_one_of_them_is_used_somewhere():
    used = {found["name"] for path in figures.pages() for found in figures.MARK.finditer(path.read_text())}
    assert figures.ROOT / "README.md" in figures.pages()
    assert used == set(figures.FIGURES)


def test_a_number_that_is_not_the_records_is_told_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "plots", dict)
    monkeypatch.setitem(figures.FIGURES, "cpu-dense", lambda: "0.42")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "README.md"
    page.write_text("takes <!-- figure cpu-dense -->0.41<!-- /figure --> of it\n")
    assert figures.main([]) == 1
    assert "README.md: cpu-dense is '0.41', its record says '0.42'" in capsys.readouterr().err
    assert "0.41" in page.read_text()
    figures.main(["--write"])
    assert page.read_text() == "takes <!-- figure cpu-dense -->0.42<!-- /figure --> of it\n"
    assert figures.main([]) == 0


def test_a_name_without_a_record_is_an_error():
    with pytest.raises(KeyError):
        figures.filled("<!-- figure no-such -->1<!-- /figure -->")


def grid_point(size, visits, predicted, seen):
    return {"layer_bytes": size << 20, "copy_visits": visits, "predicted": predicted, "seen": seen}


def row(arm, role, **values):
    return {"arm": arm, "role": role, "cell": "16 tokens", "values": values}


GRID = [
    grid_point(1, 0.25, "right", "right"),
    grid_point(4, 1.1, "close", "mixed"),
    grid_point(16, 4.0, "wrong", "wrong"),
]
MODEL = [
    row("streamed model", "product", peak_bytes=1 << 20, formula_bytes=1 << 20),
    row("model of private copies", "control", peak_bytes=3 << 20, formula_bytes=1 << 20),
]


@pytest.mark.parametrize(
    ("record", "marks"),
    [
        (
            {"gate": "race", "findings": {"size_against_rate": GRID, "explanation": "confirmed: 3"}},
            {"circle": 2, "rect": 2},
        ),
        ({"gate": "memory", "results": MODEL}, {"rect": 3}),
        (
            {"gate": "speed", "results": [row("resident", "product", tokens_per_second=9.0, peak_bytes=1 << 30)]},
            {"rect": 2},
        ),
        ({"gate": "equality", "results": []}, None),
        ({"gate": "race", "findings": {}}, None),
    ],
    ids=["race", "memory", "speed", "equality", "race without a grid"],
)
def test_a_plot_has_a_mark_for_every_row(record, marks):
    drawn = plot_gates.svg({**record, "machine": {"cpu": "a <card>"}})
    if marks is None:
        assert drawn is None
        return
    names = [element.tag.rsplit("}", 1)[1] for element in xml.etree.ElementTree.fromstring(drawn).iter()]
    assert {name: names.count(name) for name in marks} == marks


def test_numerics_plot_has_a_dot_for_every_place_that_a_multiply_of_the_product_has():
    data = json.loads((figures.RECORDS / "cpu-gate-numerics.json").read_text())
    rows = [row for row in data["results"] if row["arm"] == "auto"]
    places = {(row["cell"].split()[2], row["values"]["path"], row["values"]["ratio"]) for row in rows}
    drawn = plot_gates.svg(data)
    assert drawn.count("<circle") == len(places) > 3 and f"Error of {len(rows)} multiplies" in drawn
