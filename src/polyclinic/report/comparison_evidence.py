"""A comparison's folder as data: `comparison.json`, and those of its runs whose folders are there."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyclinic.errors import BadInput
from polyclinic.json_types import JsonObject, parse_json
from polyclinic.report.evidence import RunEvidence, open_run
from polyclinic.report.summary import recovered
from polyclinic.report.words import IN_UNIT

FILE = "comparison.json"


@dataclass(frozen=True)
class ComparisonEvidence:
    """A comparison and those of its runs whose folders are there, by method."""

    folder: Path
    content: JsonObject
    runs: dict[str, list[RunEvidence]]
    sources: dict[str, str]

    @property
    def metric(self) -> str:
        return str(self.content["metric"])

    @property
    def unit(self) -> str:
        every = [run.unit for runs in self.runs.values() for run in runs]
        return every[0] if every and self.metric in IN_UNIT else ""

    @property
    def first(self) -> RunEvidence | None:
        return next((run for runs in self.runs.values() for run in runs), None)

    @property
    def baseline(self) -> str:
        """The method that the others are tested against."""
        return str(self.content.get("baseline") or next(iter(self.content["methods"])))

    def spread(self, method: str, name: str) -> Mapping[str, float]:
        return self.content["methods"].get(method, {}).get(name, {})


def open_comparison(folder: Path, *, images: bool = True) -> ComparisonEvidence:
    """The evidence of a comparison's folder; runs that are gone or not finished are left out."""
    file = folder / FILE
    try:
        raw = file.read_bytes()
        content = parse_json(raw)
        rows, methods = list(content["rows"]), dict(content["methods"])
        if not rows or not methods or not isinstance(content["metric"], str):
            raise ValueError("it has no finished run")
        names: dict[str, list[str]] = {}
        for row in rows:
            names.setdefault(str(row["method"]), []).append(
                _folder_of(row, folds=max(r.get("fold") or 0 for r in rows))
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{file}: is damaged or empty ({error}); run the comparison again") from None
    runs: dict[str, list[RunEvidence]] = {}
    for method, folders in names.items():
        there = [folder / name for name in folders if (folder / name / "result.json").is_file()]
        runs[method] = [open_run(path, images=images) for path in there]
    return ComparisonEvidence(folder, content, runs, {FILE: hashlib.sha256(raw).hexdigest()})


def _folder_of(row: Mapping[str, Any], folds: int) -> str:
    """The folder of a row's run, below the comparison's; names are plain, so that none leads elsewhere."""
    method, fold = str(row["method"]), row.get("fold")
    if "/" in method or "\\" in method or method.startswith("."):
        raise ValueError(f"'{method}' is no name of a method")
    start = f"{method}-seed{int(row['seed'])}"
    return f"{start}-fold{int(fold)}of{int(folds)}" if fold else start


def share_recovered(runs: Sequence[RunEvidence]) -> float | None:
    """The largest share of attacked images that an attack recovered in any run; None where no attack rebuilt images.

    Where real images left as they are, nothing has to be attacked: all of them are recovered.
    """
    if any("real-images" in kinds for run in runs for kinds in run.ledgers.by_kind().values()):
        return 1.0
    found = [one for run in runs if run.audit is not None and (one := recovered(run.audit)) is not None]
    return max(count / max(1, images) for count, images in found) if found else None
