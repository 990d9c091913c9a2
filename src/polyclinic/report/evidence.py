"""Evidence of a report: the files of a run folder or of a comparison, read as data and never as code, and images.

A folder may come from somebody else. Its study is read as plain tables, so that none of its plug-ins runs here; texts
are texts, whatever they contain; numbers are checked where they are used.
"""

import hashlib
import io
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pydantic import ValidationError

from polyclinic.data.datasets import SOURCES
from polyclinic.data.partitions import PARTITIONS
from polyclinic.data.parts import SiteData, open_site, prepare
from polyclinic.data.plots import mosaic
from polyclinic.data.source import AT_SITES
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.ledger.keys import head_from_json
from polyclinic.federation.ledger.ledger import LedgerBroken, check_head, verify
from polyclinic.json_types import JsonMapping, JsonObject, parse_json
from polyclinic.report.blocks import IN_UNIT
from polyclinic.run_folder import FINISHED, check_whole, history_of
from polyclinic.runner.evaluate.case_scores import Cases, read_cases

#: files of a finished run that a report reads, and whose digests it compares
READ = tuple(name for name in FINISHED if name != "model.safetensors")
#: the main metric of each kind of task
MAIN = {"classification": "accuracy", "regression": "mae", "segmentation": "dice"}
COMPARISON = "comparison.json"
#: tables that a result must have
TABLES = ("metrics", "data", "communication", "heterogeneity", "environment", "selected", "timing")
#: a side of a shown image, in pixels, and how many a row has
SIDE, SHOWN = 96, 8
#: a drawn picture that is larger than this is not put into the page
LARGEST = 8 * 2**20


# --- ledgers --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ledgers:
    """Lines of each site's ledger, by site, and what is wrong with those that do not hold."""

    lines: dict[str, list[JsonObject]]
    broken: dict[str, str]

    def by_kind(self) -> dict[str, Counter[str]]:
        """Bytes that left each site, by kind."""
        found = {site: Counter[str]() for site in self.lines}
        for site, lines in self.lines.items():
            for line in lines:
                found[site][str(line["kind"])] += int(line["bytes"])
        return found


def read_ledgers(folder: Path, result: Mapping[str, Any], study: Mapping[str, Any]) -> Ledgers:
    """The ledgers of a run folder. A ledger that the result names must be there. But the ledgers of a deployed run
    stay at the sites: the coordinator's folder has none."""
    files = {file.stem: file for file in sorted((folder / "ledger").glob("*.jsonl"))}
    ends = result.get("ledgers")
    ends = ends if isinstance(ends, Mapping) and (files or not _is_deployed(study)) else {}
    found = Ledgers({}, {})
    for site in [*files, *(site for site in ends if site not in files)]:
        try:
            found.lines[site] = _checked(folder, site, files.get(site), ends.get(site))
        except (LedgerBroken, OSError, ValueError, KeyError, TypeError) as error:
            found.broken[site] = " ".join(str(error).replace(f"{folder}/", "").split())
    return found


def _is_deployed(study: Mapping[str, Any]) -> bool:
    data = study.get("data")
    return isinstance(data, Mapping) and data.get("source") in AT_SITES


def _checked(folder: Path, site: str, file: Path | None, end: Any) -> list[JsonObject]:
    """The lines of a ledger; a site that has no file has none, whatever its name leads to."""
    lines = [] if file is None else verify(file)
    if end is not None:
        try:
            head = head_from_json([end["lines"], end["digest"], ""])
        except (ValueError, KeyError, TypeError):
            raise LedgerBroken(f"result.json: what it says about the ledger of {site} is damaged") from None
        digests = [line["digest_of_line"] for line in lines]
        check_head(head, folder / "ledger" / f"{site}.jsonl", digests, "result.json")
    return lines


# --- one run --------------------------------------------------------------------------------------------


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
        return next((like for like, metric in MAIN.items() if metric in self.scores["pooled"]), "classification")

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
        return _is_deployed(self.study)

    @property
    def personal(self) -> bool:
        """True where each site has a model of its own."""
        return self.result["model"] == "one of each site"

    @property
    def judged(self) -> Cases | None:
        """Cases of the images that the model is judged by; None where it said something that is no number."""
        cases = self.cases if self.split == "test" else self.validation
        said = None if cases is None else cases.areas if cases.predictions is None else cases.predictions
        return cases if said is not None and np.isfinite(said).all() else None

    @cached_property
    def images(self) -> "SiteImages":
        """The study's images where they are at hand, else why not."""
        if not self.show_images:
            return SiteImages("Images are left out of this report (--no-images).")
        return images_of(self.study, self.result["data"].get("digests", {}))


def open_run(folder: Path, *, images: bool = True) -> RunEvidence:
    """The evidence of a run folder; BadInput where it is none, is not finished, or is damaged."""
    check_whole(folder, *READ)
    files = _Files(folder)
    result = _result(files)
    study = files.table("study.toml", lambda content: tomllib.loads(content.decode())) or {}
    for file in sorted((folder / "ledger").glob("*.jsonl")):
        files.content(f"ledger/{file.name}")
    cases = {split: read_cases(folder, split) for split in ("test", "validation")}
    for split, found in cases.items():
        if found is not None:
            files.content(f"cases/{split}.npz")
    return RunEvidence(
        folder=folder,
        result=result,
        study=study,
        history=files.history(),
        ledgers=read_ledgers(folder, result, study),
        audit=files.table("audit.json"),
        forgetting=files.table("forgetting.json"),
        cases=cases["test"],
        validation=cases["validation"],
        show_images=images,
        sources=files.sources,
    )


class _Files:
    """The files of a folder; the SHA-256 of each that was read is noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources: dict[str, str] = {}

    def content(self, name: str) -> bytes:
        content = (self.folder / name).read_bytes()
        self.sources[name] = hashlib.sha256(content).hexdigest()
        return content

    def table(self, name: str, parse: Any = parse_json) -> JsonObject | None:
        """The table of a file; None where there is no file, BadInput where it is damaged."""
        file = self.folder / name
        if not file.is_file():
            return None
        try:
            found = parse(self.content(name))
        except (OSError, ValueError) as error:
            raise BadInput(f"{file}: is damaged ({error}); fetch it again") from None
        if not isinstance(found, dict):
            raise BadInput(f"{file}: is damaged (it holds no table); fetch it again")
        return found

    def history(self) -> list[JsonObject]:
        name = "history.jsonl"
        return history_of(self.content(name).decode("utf-8", "replace")) if (self.folder / name).is_file() else []


def _result(files: _Files) -> JsonObject:
    folder, result = files.folder, files.table("result.json")
    if result is None and (folder / "study.toml").exists():
        raise BadInput(f"{folder}: the run is not finished; `polyclinic run --resume --out {folder}` ends it")
    if result is None:
        raise BadInput(f"{folder}: is neither a run nor a comparison; name the folder of a run or comparison")
    try:
        tables = {name: result[name] for name in TABLES}
        tables |= {f"metrics.{name}": result["metrics"][name] for name in ("test", "mean", "per_site")}
        for name, table in tables.items():
            if not isinstance(table, dict):
                raise TypeError(f"{name} must be a table")
        int(result["communication"]["total_bytes"])
        list(result["data"]["counts"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{folder / 'result.json'}: is damaged ({error}); fetch it again") from None
    return result


# --- a comparison ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComparisonEvidence:
    """A comparison and those of its runs whose folders are there, by method."""

    folder: Path
    content: JsonObject
    runs: dict[str, list[RunEvidence]]

    @property
    def metric(self) -> str:
        return str(self.content["metric"])

    @property
    def unit(self) -> str:
        return self.first.unit if self.first and self.metric in IN_UNIT else ""

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
        content = parse_json(file.read_bytes())
        rows, methods = list(content["rows"]), dict(content["methods"])
        if not rows or not methods or not isinstance(content["metric"], str):
            raise ValueError("it has no finished run")
        folds = max(row.get("fold") or 0 for row in rows)
        folders = [(str(row["method"]), folder / _folder_of(row, folds)) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{file}: is damaged or empty ({error}); run the comparison again") from None
    runs: dict[str, list[RunEvidence]] = {method: [] for method, _ in folders}
    for method, place in folders:
        if (place / "result.json").is_file():
            runs[method].append(open_run(place, images=images))
    return ComparisonEvidence(folder, content, runs)


def _folder_of(row: Mapping[str, Any], folds: int) -> str:
    """The folder of a row's run, below the comparison's; names are plain, so that none leads elsewhere."""
    method, fold = str(row["method"]), row.get("fold")
    if "/" in method or "\\" in method or method.startswith("."):
        raise ValueError(f"'{method}' is no name of a method")
    start = f"{method}-seed{int(row['seed'])}"
    return f"{start}-fold{int(fold)}of{int(folds)}" if fold else start


# --- images ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SiteImages:
    """Each site's images, or the sentence that says why there are none."""

    why_none: str = ""
    sites: Mapping[str, SiteData] = field(default_factory=dict)


def images_of(study: JsonMapping, digests: JsonMapping) -> SiteImages:
    """The images of a study, if they are those that the run was made with.

    Only sources and partitions of this package are opened, so that a study from somebody else runs none of its code.
    """
    if _is_deployed(study):
        return SiteImages("The images are at their sites, and none is in this report.")
    data, sites = dict(study.get("data", {})), dict(study.get("sites", {}))
    source, partition = (
        SOURCES.builtin.get(str(data.get("source"))), PARTITIONS.builtin.get(str(sites.get("partition")))
    )  # fmt: skip
    if source is None or partition is None or study.get("plugins"):
        return SiteImages("No images are shown: the study's data need a plug-in, and a report runs no code of a study.")
    try:
        prepared = prepare(source.model_validate(data), partition.model_validate(sites))
        if prepared.info["digests"] != dict(digests):
            return SiteImages("No images are shown: the images here are not those that the run was made with.")
        return SiteImages(sites={name: open_site(prepared.folder, name) for name in prepared.names})
    except (BadInput, WorkFailed, ValidationError, OSError):
        return SiteImages("No images are shown: the study's images are not on this machine.")


def rows_png(rows: Sequence[np.ndarray]) -> bytes:
    """Rows of images uint8 [N, C, H, W] as one PNG; small ones are enlarged without smoothing."""
    scale = max(1, SIDE // rows[0].shape[-1])
    return _png(mosaic([np.asarray(row).repeat(scale, axis=-2).repeat(scale, axis=-1) for row in rows]))


def _png(pixels: np.ndarray) -> bytes:
    """uint8 [H, W, 3] as a PNG."""
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG", optimize=True)
    return content.getvalue()


def drawn_picture(folder: Path, path: Any) -> bytes | None:
    """A PNG that lies in a run folder, decoded and written anew; None for anything else, and for a path outside it."""
    file = (folder / str(path)).resolve()
    if not file.is_relative_to(folder.resolve()) or not file.is_file() or file.stat().st_size > LARGEST:
        return None
    try:
        with Image.open(file, formats=["PNG"]) as picture:
            return _png(np.asarray(picture.convert("RGB")))
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
