"""The page of gates on a small card, from reports that are made up; where the card is not free, nothing runs."""

import importlib.util
import json
import pathlib

import pytest
import torch

from nybble.gate import every

HARNESS = pathlib.Path(__file__).parents[3] / "benchmarks/harness"
spec = importlib.util.spec_from_file_location("small_card", HARNESS / "small_card.py")
small_card = importlib.util.module_from_spec(spec)
spec.loader.exec_module(small_card)

FREE = 8 << 30
REPORTS = {
    "numerics": {"not_run": {"28672x8192": "needs 9 MiB, 7 MiB are free", "other": "no peer"}, "results": [{}, {}]},
    "memory": {"not_run": {}, "results": [{}], "as_predicted": {"a": 3}},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(every, "card", lambda device: "h200")
    results = [{"gate": name, "exit": 0, "seconds": 1.5} for name in REPORTS]
    (tmp_path / "h200-gates-all.json").write_text(json.dumps({"results": results}))
    for name, report in REPORTS.items():
        (tmp_path / f"h200-gate-{name}.json").write_text(json.dumps(report))
    return tmp_path


def test_a_row_says_what_was_left_out_for_want_of_memory_and_nothing_else(folder):
    numerics, memory = small_card.rows_of(folder)
    assert numerics["left_out"] == {"28672x8192": "needs 9 MiB, 7 MiB are free"} and numerics["compared"] == 2
    assert memory["left_out"] == {} and memory["compared"] == 4


def test_the_page_has_the_memory_that_was_used_and_every_gate(folder):
    rows = [row | {"commit": "abc", "used_mib": 5000} for row in small_card.rows_of(folder)]
    data = {"gib": 7.6, "gpu": "H", "question": "?", "exit": 1, "free_mib": 7782, "command": "c", "commit": "abc"}
    page = small_card.markdown(data | {"versions": {"torch": "2"}, "rows": rows, "not_measured": "much."}, "name")
    assert "Worst exit code 1; 7782 MiB were free" in page and "Not measured: much." in page
    assert "| numerics | 0 | 1.5 | 2 | 5000 | abc | 28672x8192 (needs 9 MiB, 7 MiB are free) |" in page
    assert "| memory | 0 | 1.5 | 4 | 5000 | abc | nothing |" in page


def test_rows_of_gates_that_do_not_run_again_stay(tmp_path):
    path = tmp_path / "record.json"
    new = [{"gate": "share", "commit": "b"}]
    assert small_card.kept_rows(path, new) == []
    path.write_text(json.dumps({"rows": [{"gate": "share", "commit": "a"}, {"gate": "race", "commit": "a"}]}))
    assert small_card.kept_rows(path, new) == [{"gate": "race", "commit": "a"}]


@pytest.mark.parametrize("used", [small_card.BUSY_MIB + 1, 0])
def test_a_card_that_others_use_or_that_is_smaller_is_no_verdict(monkeypatch, capsys, used):
    total = 80 << 30 if used else FREE // 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (total - used * small_card.MIB, total))
    assert small_card.main(["--gib", "7.6"]) == 3
    assert f"{used} MiB of the card are in use" in capsys.readouterr().out
