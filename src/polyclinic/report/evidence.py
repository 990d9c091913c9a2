"""What a report is made of: the files of a run folder or of a comparison, read as data and never as code.

A folder may come from somebody else. Its study is read as plain tables, so that none of its plug-ins runs here; texts
are texts, whatever they contain; numbers are checked where they are used.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from polyclinic.errors import BadInput
from polyclinic.federation.ledger.ledger import verify
from polyclinic.federation.ledger.signing import Head, LedgerBroken, check_head, head_from_json
from polyclinic.files import FINISHED, check_noted
from polyclinic.formats import check_run_format
from polyclinic.json_types import JsonMapping, JsonObject, parse_json
from polyclinic.report.metric_names import IN_UNIT
from polyclinic.report.pictures import SiteImages, images_of
from polyclinic.runner.evaluate.case_scores import Cases, read_cases

#: files of a finished run that a report reads, and whose digests it compares
READ = tuple(name for name in FINISHED if name != "model.safetensors")
#: the main metric of each kind of task
MAIN = {"classification": "accuracy", "regression": "mae", "segmentation": "dice"}


@dataclass(frozen=True)
class Ledgers:
    """Lines of each site's ledger, by site, and what is wrong with those that do not hold."""

    lines: dict[str, list[JsonObject]]
    broken: dict[str, str]

    def by_kind(self) -> dict[str, Counter[str]]:
        """Bytes that left each site, by kind."""
        found = {}
        for site, lines in self.lines.items():
            found[site] = Counter[str]()
            for line in lines:
                found[site][str(line["kind"])] += int(line["bytes"])
        return found


@dataclass(frozen=True)
class RunEvidence:
    """One finished run. What it did not keep is None or empty."""

    folder: Path
    result: JsonObject
    study: JsonObject
    history: list[JsonObject]
    ledgers: Ledgers
    audit: JsonObject | None
    forgetting: JsonObject | None
    cases: Cases | None
    validation: Cases | None
    show_images: bool = True
    #: SHA-256 of every file that was read, by its path in the folder
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def like(self) -> str:
        """The kind of task: that of the cases, else by what was measured."""
        if self.cases is not None:
            return self.cases.like
        names = self.scores["pooled"]
        return next((like for like, metric in MAIN.items() if metric in names), "classification")

    @property
    def metric(self) -> str:
        """The task's main metric."""
        return MAIN[self.like]

    @property
    def split(self) -> str:
        """The images that the released model was judged by: test, or validation where nothing was tested."""
        return "validation" if self.result["metrics"].get("validation") else "test"

    @property
    def scores(self) -> JsonObject:
        """`pooled`, `mean` and `per_site` of the released model."""
        metrics = self.result["metrics"]
        return metrics.get("validation") or {"pooled": metrics["test"], **metrics}

    @property
    def sites(self) -> list[str]:
        return list(self.result["data"]["counts"])

    @property
    def classes(self) -> list[str]:
        """Names of the classes, numbers where the result does not say them."""
        named = [str(name) for name in self.result["data"].get("classes", [])]
        if named or self.cases is None or self.cases.predictions is None or self.like != "classification":
            return named
        return [str(i) for i in range(self.cases.predictions.shape[1])]

    @property
    def unit(self) -> str:
        return str(self.result["data"].get("unit", ""))

    @property
    def is_deployed(self) -> bool:
        return self.study.get("data", {}).get("source") == "at-sites"

    @property
    def personal(self) -> bool:
        """Whether each site has a model of its own."""
        return self.result["model"] == "one of each site"

    @property
    def judged(self) -> Cases | None:
        """Cases of the images that the model is judged by; None where it said something that is no number."""
        cases = self.cases if self.split == "test" else self.validation
        said = None if cases is None else cases.areas if cases.predictions is None else cases.predictions
        return cases if said is not None and np.isfinite(said).all() else None

    @cached_property
    def images(self) -> SiteImages:
        """The study's images where they are at hand, else why not."""
        if not self.show_images:
            return SiteImages("Images are left out of this report (--no-images).")
        return images_of(self.study, self.result["data"].get("digests", {}))


def open_run(folder: Path, *, images: bool = True) -> RunEvidence:
    """The evidence of a run folder; BadInput where it is none, is not finished, or is damaged."""
    check_run_format(folder)
    check_noted(folder, *READ)
    sources: dict[str, str] = {}
    result = _result(folder, sources)
    study = _toml(folder / "study.toml", folder, sources)
    return RunEvidence(
        folder=folder,
        result=result,
        study=study,
        history=_lines(folder / "history.jsonl", folder, sources),
        ledgers=_ledgers(folder, sources, result, study),
        audit=_json(folder / "audit.json", folder, sources),
        forgetting=_json(folder / "forgetting.json", folder, sources),
        cases=_cases(folder, "test", sources),
        validation=_cases(folder, "validation", sources),
        show_images=images,
        sources=sources,
    )


def _result(folder: Path, sources: dict[str, str]) -> JsonObject:
    result = _json(folder / "result.json", folder, sources)
    if result is None:
        begun = (folder / "study.toml").exists()
        cure = (
            f"`polyclinic run --resume --out {folder}` ends it" if begun else "name the folder of a run or comparison"
        )
        what = "the run is not finished" if begun else "is neither a run nor a comparison"
        raise BadInput(f"{folder}: {what}; {cure}")
    try:
        for table in ("metrics", "data", "communication", "heterogeneity", "environment", "selected", "timing"):
            if not isinstance(result[table], dict):
                raise TypeError(f"{table} must be a table")
        for name in ("test", "mean", "per_site"):
            if not isinstance(result["metrics"][name], dict):
                raise TypeError(f"metrics.{name} must be a table")
        int(result["communication"]["total_bytes"])
        list(result["data"]["counts"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{folder / 'result.json'}: is damaged ({error}); fetch it again") from None
    return result


def _note(file: Path, folder: Path, sources: dict[str, str]) -> bytes:
    content = file.read_bytes()
    sources[file.relative_to(folder).as_posix()] = hashlib.sha256(content).hexdigest()
    return content


def _json(file: Path, folder: Path, sources: dict[str, str]) -> JsonObject | None:
    if not file.is_file():
        return None
    try:
        found = parse_json(_note(file, folder, sources))
    except (OSError, ValueError) as error:
        raise BadInput(f"{file}: is damaged ({error}); fetch it again") from None
    if not isinstance(found, dict):
        raise BadInput(f"{file}: is damaged (it holds no table); fetch it again")
    return found


def _toml(file: Path, folder: Path, sources: dict[str, str]) -> JsonObject:
    try:
        return tomllib.loads(_note(file, folder, sources).decode()) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise BadInput(f"{file}: is damaged ({error}); fetch it again") from None


def _lines(file: Path, folder: Path, sources: dict[str, str]) -> list[JsonObject]:
    """Lines of JSON, without one that is only half written."""
    found = []
    for text in _note(file, folder, sources).decode("utf-8", "replace").splitlines() if file.is_file() else []:
        try:
            line: Any = parse_json(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("round"), int):
            found.append(line)
    return found


def _ledgers(folder: Path, sources: dict[str, str], result: JsonObject, study: JsonObject) -> Ledgers:
    for file in sorted((folder / "ledger").glob("*.jsonl")):
        _note(file, folder, sources)
    return Ledgers(*read_ledgers(folder, result, study))


def _cases(folder: Path, split: str, sources: dict[str, str]) -> Cases | None:
    cases = read_cases(folder, split)
    if cases is not None:
        _note(folder / "cases" / f"{split}.npz", folder, sources)
    return cases


Lines = dict[str, list[JsonObject]]


def read_ledgers(folder: Path, result: Mapping[str, Any], study: Mapping[str, Any]) -> tuple[Lines, dict[str, str]]:
    """Lines of each ledger that holds, by site, and what is wrong with the others.

    A ledger that the result names must be there. But the ledgers of a deployed run stay at the sites: the
    coordinator's folder has none.
    """
    files = {file.stem: file for file in sorted((folder / "ledger").glob("*.jsonl"))}
    ends = result.get("ledgers")
    ends = ends if isinstance(ends, Mapping) and (files or not _is_deployed(study)) else {}
    lines: Lines = {}
    broken = {}
    for site in [*files, *(site for site in ends if site not in files)]:
        try:
            lines[site] = _checked(folder, site, files.get(site), ends.get(site))
        except (LedgerBroken, OSError, ValueError, KeyError, TypeError) as error:
            broken[site] = " ".join(str(error).replace(f"{folder}/", "").split())
    return lines, broken


def _is_deployed(study: Mapping[str, Any]) -> bool:
    data = study.get("data")
    return isinstance(data, Mapping) and data.get("source") == "at-sites"


def _checked(folder: Path, site: str, file: Path | None, end: Any) -> list[JsonObject]:
    """The lines of a ledger; a site that has no file has none, whatever its name leads to."""
    lines = [] if file is None else verify(file)
    if end is not None:
        digests = [line["digest_of_line"] for line in lines]
        check_head(_head(end, site), folder / "ledger" / f"{site}.jsonl", digests, "result.json")
    return lines


def _head(end: Any, site: str) -> Head:
    try:
        return head_from_json([end["lines"], end["digest"], ""])
    except (ValueError, KeyError, TypeError):
        raise LedgerBroken(f"result.json: what it says about the ledger of {site} is damaged") from None


COMPARISON = "comparison.json"


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
    file = folder / COMPARISON
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
    return ComparisonEvidence(folder, content, runs, {COMPARISON: hashlib.sha256(raw).hexdigest()})


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


def recovered(audit: JsonMapping) -> tuple[int, int] | None:
    """Images that the strongest attack recovered, and how many it was tried on; None where none rebuilds images."""
    found = []
    for parcel in audit.get("parcels", []):
        for finding in parcel.get("findings", []):
            evidence = finding.get("evidence", {})
            if isinstance(evidence.get("recovered"), int) and isinstance(evidence.get("images"), int):
                found.append((evidence["recovered"], evidence["images"]))
    return max(found, key=lambda one: (one[0] / max(1, one[1]), one[1])) if found else None
