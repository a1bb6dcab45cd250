"""docs/evidence.md: a claim's command is the one that its record was made with, and no record is left out."""

import json
import pathlib
import re
import shlex

import pytest

ROOT = pathlib.Path(__file__).parents[3]
RECORDS = ROOT / "benchmarks" / "records"
PAGE = (ROOT / "docs" / "evidence.md").read_text()
CLAIM = re.compile(r"^\| (?P<claim>.+) \| `(?P<command>python -m nybble\.gate .+?)` \| \[(?P<record>[\w-]+)\]", re.M)
CLAIMS = [(found["record"], found["command"].replace("\\|", "|")) for found in CLAIM.finditer(PAGE)]


@pytest.mark.parametrize(("name", "command"), CLAIMS, ids=[name for name, _ in CLAIMS])
def test_a_claims_command_is_the_one_of_its_record(name, command):
    record = json.loads((RECORDS / f"{name}.json").read_text())
    assert sorted(shlex.split(record["command"])) == sorted(shlex.split(command))
    assert record["verdict"] == 0 and record["gate"] == command.split()[3]


def test_every_record_of_a_gate_is_on_the_page():
    assert {path.stem for path in RECORDS.glob("*-gate*-*.json")} == {name for name, _ in CLAIMS}


def test_every_other_record_is_on_the_page():
    missing = [path.name for path in RECORDS.glob("*.md") if f"records/{path.name})" not in PAGE]
    assert missing == []
