"""JSON Schemas: what methods write follows them (`tiny_run`, `undisturbed` check every run); wrong files do not."""

import json
from pathlib import Path
from typing import Any

import pytest
from json_schemas import NAMES, SCHEMAS, assert_valid, errors, validator

FINISHED = Path(__file__).parent / "data" / "run_format_1" / "finished"


def example(name: str) -> dict[str, Any]:
    """A right value of a schema."""
    if name == "result":
        return json.loads((FINISHED / "result.json").read_text())
    if name == "ledger_line":
        return json.loads((FINISHED / "ledger" / "site-1.jsonl").read_text().splitlines()[0])
    return json.loads((FINISHED / "history.jsonl").read_text().splitlines()[0])


def test_every_schema_is_one_and_is_listed_here():
    assert {path.name for path in SCHEMAS.iterdir()} == {f"{name}.schema.json" for name in NAMES}
    for name in NAMES:
        validator(name).check_schema(validator(name).schema)


@pytest.mark.parametrize(("name", "path", "value"), [
    ("result", "seed", "0"),
    ("result", "weights_sha256", "abc"),
    ("result", "metrics.test.accuracy", "high"),
    ("result", "metrics.per_site.site-1", [1]),
    ("result", "communication.by_kind.weights", -1),
    ("result", "privacy", {"epsilon": 3.0}),
    ("ledger_line", "bytes", 1.5),
    ("ledger_line", "digest", "A" * 64),
    ("ledger_line", "privacy", {}),
    ("ledger_line", "note", "a key that nobody knows"),
    ("history_line", "round", 0),
    ("history_line", "validation.pooled.loss", None),
])  # fmt: skip
def test_a_wrong_value_is_found(name, path, value):
    wrong = example(name)
    assert errors(name, wrong) == []
    *parents, last = path.split(".")
    table = wrong
    for parent in parents:
        table = table[parent]
    table[last] = value
    assert errors(name, wrong)


def test_privacy_is_described_too(tiny, undisturbed):
    study = tiny("fedavg", {"privacy.noise_multiplier": 1.0, "model.norm": "group"}, rounds=1)
    result = undisturbed(study)  # which holds the folder against the schemas
    assert result["privacy"]["epsilon"] > 0
    lines = (result.folder / "ledger" / "site-1.jsonl").read_text().splitlines()
    assert any(json.loads(line)["privacy"] for line in lines)


def test_the_kept_run_folder_follows_them():
    assert_valid(FINISHED)
