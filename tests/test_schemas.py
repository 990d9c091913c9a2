"""JSON Schemas: what methods write follows them (`tiny_run`, `undisturbed` check every run); wrong files do not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from json_schemas import NAMES, SCHEMAS, assert_valid, errors, validator

FINISHED = Path(__file__).parent / "data" / "run_format_1" / "finished"


def example(name: str) -> dict[str, Any]:
    """A right value of each schema."""
    if name == "result":
        return json.loads((FINISHED / "result.json").read_text())
    if name == "ledger_line":
        return json.loads((FINISHED / "ledger" / "site-1.jsonl").read_text().splitlines()[0])
    if name == "history_line":
        return json.loads((FINISHED / "history.jsonl").read_text().splitlines()[0])
    if name == "comparison":
        row = {"method": "cwt", "seed": 0, "total_bytes": 7, "seconds": 1.5, "mean_ks": 0.2, "weights_sha256": "a" * 64}
        spread = {"mean": 0.5, "std": 0.0, "n": 1}
        methods = {"cwt": {"test_accuracy": spread}}
        study = {"method": {"name": "cwt"}}
        return {"study": study, "task": "classification", "metric": "accuracy", "methods": methods, "rows": [row]}
    if name == "tuning":
        trial = {"method": "cwt", "settings": {"optimizer.lr": 0.1}, "runs": [{"seed": 0, "folder": "cwt-0-seed0"}]}
        budget = {"runs_of_each_method": 1, "seeds": 1, "rounds": 2}
        methods = {"cwt": {"search": "all", "possible": 1, "tried": 1, "runs": 1}}
        head = {"task": "classification", "metric": "accuracy", "better": "higher", "scored_on": "validation"}
        over = {"optimizer.lr": [0.1]}
        return {**head, "budget": budget, "over": over, "methods": methods, "trials": [trial], "study": {}}
    verdict = {"left": 1, "verdict": "not tested", "words": "not tested", "not_tried": []}
    head = {"method": "cwt", "seed": 0, "threat_model": "", "granted": [], "budget": "quick", "features": "pixels"}
    return {**head, "complete": False, "verdicts": {"weights": verdict}, "parcels": []}


def test_every_schema_is_one_and_is_listed_here():
    assert {path.name for path in SCHEMAS.iterdir()} == {f"{name}.schema.json" for name in NAMES}
    for name in NAMES:
        validator(name).check_schema(validator(name).schema)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_key_is_found(name):
    right = example(name)
    assert errors(name, right) == []
    for key in validator(name).schema["required"]:
        wrong = {known: value for known, value in right.items() if known != key}
        assert errors(name, wrong) == [f"$: {key!r} is a required property"]


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
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
        ("comparison", "methods.cwt.test_accuracy.n", 0),
        ("tuning", "scored_on", "test"),
        ("audit", "verdicts.weights.left", None),
    ],
)
def test_a_wrong_value_is_found(name, path, value):
    wrong = copy.deepcopy(example(name))
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
