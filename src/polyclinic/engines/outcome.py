"""The outcome of a run in another process, as a JSON file: its result, or the error that ended it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from polyclinic.engines.worker_process import reason_of
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.files import atomic_write
from polyclinic.json_types import JsonObject, parse_json


@dataclass(frozen=True)
class Outcome:
    """`error` is None when all went well, else the name of the exception; `reason` one sentence."""

    error: str | None = None
    reason: str | None = None
    values: JsonObject | None = None

    @classmethod
    def of(cls, work: Callable[[], JsonObject]) -> Outcome:
        """What became of a piece of work."""
        try:
            return cls(values=work())
        except Exception as error:
            return cls(type(error).__name__, reason_of(error))

    def result(self) -> JsonObject:
        """What was found; BadInput or WorkFailed if nothing was."""
        if self.values is not None:
            return self.values
        raise BadInput(self.reason or "") if self.error == "BadInput" else WorkFailed(self.reason or "")

    def write(self, path: Path) -> None:
        atomic_write(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Outcome:
        return cls(**parse_json(path.read_text(encoding="utf-8")))
