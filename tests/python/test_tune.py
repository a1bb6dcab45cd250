import json
import types

import pytest
import torch

import nybble
from nybble import tune, tune_table
from nybble.timing import Problem, Times

CARD = "A card"


@pytest.fixture(autouse=True)
def no_table_left_behind():
    yield
    tune.use(None)


def times(m, us, auto, direction="forward", n=256, k=128):
    return Times(Problem(n, k, m, direction), us, dict.fromkeys(us, 0.01), auto, "plan, measured")


def test_a_path_replaces_the_built_in_choice_only_when_it_is_clearly_faster():
    assert tune.choose(times(8, {"row": 97.5, "portable": 100, "dense": 1, "dequantise": 1}, "portable")) == "portable"
    assert tune.choose(times(8, {"row": 96.0, "portable": 100, "dense": 1, "dequantise": 1}, "portable")) == "row"
    assert tune.choose(times(8, {"row": 96.0, "dequant": 90}, "row")) == "dequant"


def test_measured_tokens_stand_for_their_neighbourhood_and_equal_neighbours_are_one_line():
    results = [
        times(1, {"row": 1, "portable": 2}, "row"),
        times(8, {"row": 1, "portable": 2}, "row"),
        times(16, {"row": 3, "portable": 2}, "row"),
        times(1024, {"portable": 3, "dequant": 2}, "portable"),
    ]
    lines = tune.entries_of(CARD, reversed(results))
    assert [(line["m_min"], line["m_max"], line["path"]) for line in lines] == [
        (1, 11, "row"),
        (12, 128, "portable"),
        (129, 1024, "dequant"),
    ]
    assert {line["direction"] for line in lines} == {"forward"} and lines[0]["device"] == CARD


def test_shapes_and_directions_get_lines_of_their_own_and_the_library_takes_them():
    results = [
        times(m, {"row": 1, "portable": 2}, "row", direction, n)
        for m in (1, 2, 5)
        for direction in ("forward", "grad_input")
        for n in (256, 512)
    ]
    lines = tune.entries_of(CARD, results)
    assert len(lines) == 4 and all((line["m_min"], line["m_max"]) == (1, 5) for line in lines)
    tune.activate(tune.to_text(lines, [dict(us={"row": 1.0})]))
    assert [json.loads(tune.active()[0])["entries"][i]["n"] for i in range(4)] == [256, 512, 256, 512]


def test_use_makes_a_file_active_and_none_forgets_it(tmp_path):
    assert tune.active() == ("", 0)
    line = tune.entry(CARD, Problem(256, 128, 5, "forward"), 5, 8, "dequant")
    (tmp_path / "table.json").write_text(tune.to_text([line]))
    tune.use(tmp_path / "table.json")
    text, digest = tune.active()
    assert json.loads(text)["entries"] == [line] and digest != 0
    tune.use(None)
    assert tune.active() == ("", 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{}", 'no "nybble_tune"'),
        ('{"nybble_tune": 9, "entries": []}', "version 9, this build reads 1"),
        (tune.to_text([tune.entry(CARD, Problem(1, 1, 1, "forward"), 1, 1, "quick")]), 'path "quick"'),
    ],
)
def test_a_bad_file_is_a_value_error_and_the_table_before_stays(tmp_path, text, message):
    tune.activate(tune.to_text([tune.entry(CARD, Problem(256, 128, 5, "forward"), 5, 8, "row")]))
    before = tune.active()
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        tune.use(tmp_path / "bad.json")
    with pytest.raises(OSError, match="missing"):
        tune.use(tmp_path / "missing.json")
    assert tune.active() == before


def test_forced_restores_the_table_before_also_after_an_error():
    tune.activate(tune.to_text([tune.entry(CARD, Problem(256, 128, 5, "forward"), 5, 8, "row")]))
    before = tune.active()
    with (
        pytest.raises(RuntimeError, match="inside"),
        tune_table.forced(CARD, Problem(8, 8, 8, "grad_input"), "portable"),
    ):
        assert tune.active() != before
        raise RuntimeError("inside")
    assert tune.active() == before


def test_shapes_tokens_and_configs_are_read_or_refused(tmp_path):
    assert tune.parse_shapes("4096x14336, 8x16") == [(4096, 14336), (8, 16)]
    assert tune.parse_tokens("16,1,16") == [1, 16]
    for text in ("4096", "0x4", "4x", "axb", ""):
        with pytest.raises(ValueError, match="expected OUTxIN"):
            tune.parse_shapes(text)
    for text in ("0", "1,,2", "", "-1", "1 2"):
        with pytest.raises(ValueError, match="expected numbers from 1 on"):
            tune.parse_tokens(text)
    config = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert tune.shapes_of_config(path) == [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)]
    path.write_text("{}")
    with pytest.raises(ValueError, match="hidden_size"):
        tune.shapes_of_config(path)


def test_the_file_is_named_after_the_card(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tune.default_file("NVIDIA GeForce RTX 3050") == tmp_path / "nybble" / "tune-nvidia-geforce-rtx-3050.json"


def test_tuning_without_a_gpu_says_so_and_writes_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main(["--out", str(tmp_path / "t.json")]) == 7
    assert "no GPU" in capsys.readouterr().err and not (tmp_path / "t.json").exists()


def test_show_prints_table_and_hash(tmp_path, capsys):
    (tmp_path / "t.json").write_text(tune.to_text([tune.entry(CARD, Problem(256, 128, 5, "forward"), 5, 8, "dequant")]))
    assert tune.main(["--show", str(tmp_path / "t.json")]) == 0
    shown = capsys.readouterr().out
    assert '"path":"dequant"' in shown and f"{tune.active()[1]:016x}" in shown
    assert tune.main(["--show", str(tmp_path / "none.json")]) == 3


def test_a_table_decides_on_the_card_it_names_and_changes_no_result_there(tmp_path):
    if not (torch.cuda.is_available() and nybble.build_info()["cuda"]):
        pytest.skip("no GPU")
    out = tmp_path / "table.json"
    assert tune.main(["--shapes", "512x512", "--m", "4", "--out", str(out), "--rounds", "3"]) == 0
    card = torch.cuda.get_device_name()
    saved = json.loads(out.read_text())
    assert saved["entries"] and all(line["device"] == card for line in saved["entries"])
    from nybble.timing import Weights

    weights = Weights(512, 512, torch.bfloat16, torch.device("cuda", torch.cuda.current_device()))
    x = torch.randn(4, 512, device="cuda", dtype=torch.bfloat16)
    for path in ("portable", "dequant"):
        with tune_table.forced(card, Problem(512, 512, 4, "forward"), path):
            nybble.reset_path_counters()
            result = weights.multiply(x, 0, "forward", "auto")
            assert nybble.path_counters()[path]["forward"] == 1
            assert path in nybble.explain(x, *weights.packed[0]) and f"{tune.active()[1]:016x}" in nybble.explain(
                x, *weights.packed[0]
            )
        torch.testing.assert_close(
            result, weights.matmul(x, 0, "forward", torch.empty_like(result)), rtol=2e-2, atol=1e-2
        )
    assert isinstance(saved["measured"], list) and types.SimpleNamespace(**saved["measured"][0]).m == 4
