"""Files of a run folder against the JSON Schemas that the package ships."""

import functools
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

SCHEMAS = files("polyclinic") / "schemas"
NAMES = ("result", "ledger_line", "history_line", "comparison", "audit", "tuning")


@functools.cache
def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads((SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8")))


def errors(name: str, value: Any) -> list[str]:
    """What the schema has against a value, with the place of each fault."""
    return [f"{error.json_path}: {error.message}" for error in validator(name).iter_errors(value)]


def assert_valid(folder: Path) -> None:
    """Every file of a run folder that has a schema follows it."""
    for name in ("result", "audit", "comparison"):
        if (file := folder / f"{name}.json").exists():
            assert errors(name, json.loads(file.read_text(encoding="utf-8"))) == [], file
    lines = {"history_line": [folder / "history.jsonl"], "ledger_line": sorted((folder / "ledger").glob("*.jsonl"))}
    for name, paths in lines.items():
        for file in (path for path in paths if path.exists()):
            for text in file.read_text(encoding="utf-8").splitlines():
                assert errors(name, json.loads(text)) == [], file
