"""Reports and stored records against report.schema.json, by a validator of the few keywords that it uses."""

import json
from pathlib import Path

import pytest

from nybble.gate import record, scope
from nybble.gate.__main__ import main
from nybble.gate.aliasing import cells

SCHEMA = json.loads(record.SCHEMA.read_text())
RECORDS = sorted(Path(__file__).parents[3].joinpath("benchmarks/records").glob("*-gate*-*.json"))
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
    "integer": int,
}
KEYWORDS = {"type", "enum", "required", "properties", "additionalProperties", "items", "anyOf", "$ref"}
WORDS = {"description", "title", "$schema", "$defs"}


def faults(value, schema, where="report"):
    """Every way in which a value is not what the schema says."""
    assert schema.keys() <= KEYWORDS | WORDS, schema.keys()
    if "$ref" in schema:
        return faults(value, SCHEMA["$defs"][schema["$ref"].rsplit("/", 1)[1]], where)
    if "anyOf" in schema:
        each = [faults(value, option, where) for option in schema["anyOf"]]
        return [] if not all(each) else min(each, key=len)
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where}: {value!r} not in {schema['enum']}"]
    names = schema.get("type", [])
    wanted = [TYPES[name] for name in ([names] if isinstance(names, str) else names)]
    if wanted and not any(isinstance(value, kind) and (kind is bool or value is not True) for kind in wanted):
        return [f"{where}: {value!r} is no {names}"]
    found = []
    if isinstance(value, dict):
        properties, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        found += [f"{where} lacks {key}" for key in schema.get("required", []) if key not in value]
        for key, item in value.items():
            if key in properties:
                found += faults(item, properties[key], f"{where}.{key}")
            elif other is False:
                found.append(f"{where}: {key} is not in the schema")
            elif other is not True:
                found += faults(item, other, f"{where}.{key}")
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            found += faults(item, schema["items"], f"{where}[{index}]")
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        ["numerics", "--device", "cpu", "--shapes", "33x65", "--largest", "3"],
        ["aliasing", "--device", "cpu", "--slots", "2", "--layers", "4", "--tokens", "2"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_reports_and_their_records_keep_to_the_schema(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cells, "GROUPS", cells.GROUPS[:1])
    assert main([*arguments, "--json", "--record", str(tmp_path / "here")]) == 0
    printed = json.loads(capsys.readouterr().out)
    stored = json.loads((tmp_path / "here.json").read_text())
    assert faults(printed, SCHEMA) == [] and faults(stored, SCHEMA) == []
    assert len(stored["results"]) == len(printed["results"])
    assert stored["command"] == "python -m nybble.gate " + " ".join([*arguments, "--json"])


def test_a_record_of_many_rows_keeps_the_first_products_numbers_and_counts_the_rest(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(record, "MANY", 10)
    assert (
        main(["numerics", "--device", "cpu", "--shapes", "33x65", "--largest", "2", "--record", str(tmp_path / "r")])
        == 0
    )
    stored = json.loads((tmp_path / "r.json").read_text())
    assert faults(stored, SCHEMA) == [] and stored["results"] == []
    assert stored["as_predicted"]["auto"] == stored["as_predicted"]["swapped rows"] == 4
    rows = [dict(zip(stored["table"]["columns"], row, strict=True)) for row in stored["table"]["rows"]]
    assert [row["arm"] for row in rows] == ["auto"] * 4 and all(row["ratio"] <= 1.05 for row in rows)
    result = {
        "arm": "auto",
        "role": "product",
        "cell": "c",
        "checks": {},
        "as_expected": False,
        "faults": [],
        "values": {},
    }
    assert record.condensed([result])["results"] == [result]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_stored_records_keep_to_the_schema_and_are_ok(path):
    data = json.loads(path.read_text())
    assert faults(data, SCHEMA) == []
    assert data["not_run"].keys() >= scope.BEYOND.get(data["gate"], {}).keys()
    assert data["verdict"] == 0 and data["commit"] != "unknown" and path.with_suffix(".md").is_file()


def test_the_validator_sees_what_does_not_fit():
    good = {"claim": "c", "holds": True, "found": "f"}
    schema = SCHEMA["properties"]["claims"]
    assert faults([good], schema) == []
    for bad in ({**good, "holds": "yes"}, {**good, "more": 1}, {"claim": "c", "holds": True}, "text"):
        assert len(faults([bad], schema)) == 1
    assert faults(4, SCHEMA["properties"]["verdict"])
