"""The report of a comparison: methods side by side, and error, recovered images and bytes in one picture."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyclinic.errors import BadInput
from polyclinic.json_types import JsonObject
from polyclinic.messages import human_bytes
from polyclinic.report.blocks import Block, Cell, Chart, Report, Section, Table, Text, number
from polyclinic.report.comparison_cases import paired_section
from polyclinic.report.evidence import RunEvidence, open_run
from polyclinic.report.sections import again, scores, sites
from polyclinic.report.summary import recovered
from polyclinic.report.theme import Theme, legend, plain, tidy
from polyclinic.report.words import IN_UNIT, LOWER, counted, listed, metric_name

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

    def spread(self, method: str, name: str) -> Mapping[str, float]:
        return self.content["methods"].get(method, {}).get(name, {})


def open_comparison(folder: Path, *, images: bool = True) -> ComparisonEvidence:
    """The evidence of a comparison's folder; runs that are gone or not finished are left out."""
    file = folder / FILE
    try:
        raw = file.read_bytes()
        content = json.loads(raw)
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


def report_of_comparison(found: ComparisonEvidence) -> Report:
    """Summary, the one picture, methods with intervals, tests, sites, curves, and how to run it again."""
    methods = list(found.content["methods"])
    sections = [
        _picture(found),
        _methods(found),
        _by_site(found),
        _curves(found),
        paired_section(found.runs, _baseline(found)),
    ]
    if found.first is not None:
        sections += [sites.section(found.first), again.section(found.first)]
    title = f"{counted(len(methods), 'method')} compared"
    source = found.content.get("study", {}).get("data", {}).get("source", "")
    subtitle = f"Comparison '{found.folder.resolve().name}' on {source}; {counted(len(found.content['rows']), 'run')}"
    return Report(title, subtitle, _summary(found), [one for one in sections if one is not None], dict(found.sources))


def _baseline(found: ComparisonEvidence) -> str:
    return str(found.content.get("baseline") or next(iter(found.content["methods"])))


def _summary(found: ComparisonEvidence) -> list[str]:
    key, metric = f"test_{found.metric}", metric_name(found.metric)
    means = {method: found.spread(method, key).get("mean") for method in found.content["methods"]}
    known = {method: float(value) for method, value in means.items() if value is not None}
    runs = max((int(found.spread(method, "seconds").get("n", 1)) for method in known), default=1)
    words = [f"The comparison has {listed(list(found.content['methods']))}, each with {counted(runs, 'run')}."]
    if known:
        order = sorted(known, key=known.__getitem__, reverse=found.metric not in LOWER)
        best, worst = order[0], order[-1]
        words.append(
            f"On the test images of all sites together {best} is best, with a mean {metric} of "
            f"{_value(found, best, key)}; {worst} is last, with {_value(found, worst, key)}."
        )
    bytes_of = {m: float(found.spread(m, "total_bytes")["mean"]) for m in known if found.spread(m, "total_bytes")}
    if bytes_of:
        most, least = max(bytes_of, key=bytes_of.__getitem__), min(bytes_of, key=bytes_of.__getitem__)
        words.append(
            f"{most} carried most, {human_bytes(bytes_of[most])} a run; {least} least, {human_bytes(bytes_of[least])}."
        )
    return [*words, _attacked(found), _tested(found)]


def _value(found: ComparisonEvidence, method: str, key: str) -> str:
    one = found.spread(method, key)
    spread = f" ± {number(float(one['std']))}" if one.get("n", 1) > 1 else ""
    return f"{number(float(one['mean']))}{spread} {found.unit}".rstrip()


def _attacked(found: ComparisonEvidence) -> str:
    shares = {method: share_recovered(runs) for method, runs in found.runs.items()}
    known = {method: share for method, share in shares.items() if share is not None}
    if not known:
        return "No run was attacked: `polyclinic audit` on a run says what an attacker could recover from what left."
    said = [f"{share:.0%} of {method}'s" for method, share in known.items()]
    missing = [method for method in shares if method not in known]
    rest = f" {listed(missing)} had no attack that rebuilds images." if missing else ""
    return f"The strongest attack recovered {listed(said)} attacked images.{rest}"


def share_recovered(runs: Sequence[RunEvidence]) -> float | None:
    """The largest share of attacked images that an attack recovered in any run; None where no attack rebuilt images.

    Where real images left as they are, nothing has to be attacked: all of them are recovered.
    """
    if any("real-images" in kinds for run in runs for kinds in run.ledgers.by_kind().values()):
        return 1.0
    found = [one for run in runs if run.audit is not None and (one := recovered(run.audit)) is not None]
    return max(count / max(1, images) for count, images in found) if found else None


def _tested(found: ComparisonEvidence) -> str:
    tests = found.content.get("statistics") or {}
    if not tests:
        return "Each method ran once: nothing says whether the differences are more than chance. Use more seeds."
    return (
        f"Intervals are over seeds (and folds): they say how much training varies on this one test set. p is that of "
        f"the paired t test against {_baseline(found)}, corrected by Holm for the number of methods."
    )


# --- the one picture -------------------------------------------------------------------------------------


def _picture(found: ComparisonEvidence) -> Section:
    key, rows = f"test_{found.metric}", []
    for method in found.content["methods"]:
        value, size = found.spread(method, key).get("mean"), found.spread(method, "total_bytes").get("mean")
        if value is not None and size is not None:
            rows.append((method, float(value), float(size), share_recovered(found.runs.get(method, []))))
    title = "Error, recovered images and bytes"
    if not rows:
        return Section("picture", title, [Text("No run has been tested: there is nothing to draw.")])
    table = Table(("method", metric_name(found.metric), "bytes carried", "share of attacked images recovered"),
                  [[m, v, s, r] for m, v, s, r in rows])  # fmt: skip
    note = (
        f"{'Lower' if found.metric in LOWER else 'Higher'} is better; fewer bytes are to the left. The larger a point, "
        "the more images an attacker recovered; green: none. A hollow point: no attack that rebuilds images was run."
    )
    words = f"{metric_name(found.metric)} against bytes, and what was recovered"
    chart = Chart("picture", words[:1].upper() + words[1:], _bubbles(found, rows), table, note, (7.2, 4.6))
    return Section("picture", title, [chart])


Row = tuple[str, float, float, float | None]


def _bubbles(found: ComparisonEvidence, rows: Sequence[Row]) -> Any:
    unit = f" ({plain(found.unit)})" if found.unit else ""

    def draw(figure: Any, theme: Theme) -> None:
        axes = figure.subplots()
        sizes = np.array([max(1.0, size) for _, _, size, _ in rows])
        axes.set_xscale("log")
        axes.set_xlim(sizes.min() / 3, sizes.max() * 6)
        for i, (method, value, _, share) in enumerate(rows):
            area = 60 + 520 * (share or 0)
            style = {"edgecolors": theme.ink, "linewidths": 1.2}
            colour = theme.colour(2) if share == 0 else theme.colour(1)
            face = {"facecolors": "none"} if share is None else {"color": colour, "alpha": 0.85}
            axes.scatter([sizes[i]], [value], s=area, marker="o", **face | style)
            words = plain(method) + ("" if share is None else f" ({share:.0%})")
            beside = {"xytext": (area**0.5 / 2 + 4, 4 if i % 2 else -8), "textcoords": "offset points"}
            axes.annotate(words, (sizes[i], value), fontsize=8.5, color=theme.ink, **beside)
        # bytes in words: no powers of ten, and none of matplotlib's formulas
        axes.xaxis.set_major_formatter(lambda value, _: human_bytes(value))
        axes.xaxis.set_minor_formatter(lambda *_: "")
        axes.margins(y=0.15)
        better = "lower" if found.metric in LOWER else "higher"
        tidy(axes, theme, x="carried in a run", y=f"test {metric_name(found.metric)}{unit}, {better} is better")

    return draw


# --- methods --------------------------------------------------------------------------------------------


def _methods(found: ComparisonEvidence) -> Section:
    names = [n for n in next(iter(found.content["methods"].values())) if n.startswith("test_")]
    statistics = found.content.get("statistics") or {}
    key = f"test_{found.metric}"
    rows: list[list[Cell]] = []
    intervals = {}
    for method in found.content["methods"]:
        entry = statistics.get(method, {}).get(key, {})
        test = entry.get("against_baseline") or {}
        p = test.get("p_holm")
        spread = [_spread(found.spread(method, name)) for name in names]
        interval = f"{number(float(entry['low']))} to {number(float(entry['high']))}" if entry else None
        rows.append([method, *spread, interval, None if p is None else float(p)])
        if entry:
            mean = float(found.spread(method, key)["mean"])
            intervals[method] = {"value": mean, "low": float(entry["low"]), "high": float(entry["high"])}
    columns = ("method", *(metric_name(name.removeprefix("test_")) for name in names), "95 % interval of the mean",
               f"p against {_baseline(found)}")  # fmt: skip
    blocks: list[Block] = [
        Table(columns, rows, "Mean ± standard deviation over runs, test images of all sites together")
    ]
    if intervals:
        title = f"Mean {metric_name(found.metric)} of each method"
        blocks.append(scores.forest("methods", title, found.metric, intervals, found.unit, "95 % interval over runs."))
    return Section("methods", "Methods side by side", blocks)


def _spread(one: Mapping[str, float]) -> Cell:
    if not one:
        return None
    return number(float(one["mean"])) + (f" ± {number(float(one['std']))}" if one.get("n", 1) > 1 else "")


def _by_site(found: ComparisonEvidence) -> Section | None:
    """Each method at each site, the mean over its runs."""
    sites_ = list(
        dict.fromkeys(site for runs in found.runs.values() for run in runs for site in run.scores["per_site"])
    )
    if not sites_:
        return None
    rows: list[list[Cell]] = []
    for method, runs in found.runs.items():
        values = [[run.scores["per_site"].get(site, {}).get(found.metric, np.nan) for site in sites_] for run in runs]
        rows.append([method, *(_mean(column) for column in zip(*values, strict=True))] if values else [method])
    words = f"{metric_name(found.metric)} of each method at each site, the mean over its runs"
    kept = [row for row in rows if len(row) > 1]
    return Section("by-site", "Methods by site", [Table(("method", *sites_), kept, words)]) if kept else None


def _mean(values: Sequence[float]) -> Cell:
    finite = [float(value) for value in values if value == value]
    return sum(finite) / len(finite) if finite else None


def _curves(found: ComparisonEvidence) -> Section | None:
    """Validation metric by round, the first run of each method."""
    curves = {}
    for method, runs in found.runs.items():
        lines = [line for line in runs[0].history if line.get("validation")] if runs else []
        points = [(line["round"], line["validation"].get("pooled", {}).get(found.metric)) for line in lines]
        if known := [(r, float(v)) for r, v in points if isinstance(v, int | float)]:
            curves[method] = known
    if not curves:
        return None
    rows = [[method, r, v] for method, points in curves.items() for r, v in points]

    def draw(figure: Any, theme: Theme) -> None:
        axes = figure.subplots()
        for i, (method, points) in enumerate(curves.items()):
            axes.plot(
                *zip(*points, strict=True), label=plain(method), marker=theme.marker(i), markersize=3, **theme.line(i)
            )
        axes.xaxis.get_major_locator().set_params(integer=True)
        tidy(axes, theme, x="round", y=f"validation {metric_name(found.metric)}")
        legend(axes, theme, loc="upper left", bbox_to_anchor=(1, 1))

    table = Table(("method", "round", metric_name(found.metric)), rows)
    chart = Chart("curves", "Validation scores by round", draw, table, "The first run of each method.")
    return Section("course", "How training went", [chart])
