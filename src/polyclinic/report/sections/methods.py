"""Methods of a comparison: error, recovered images and bytes in one picture; side by side; by site; curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polyclinic.files import human_bytes
from polyclinic.report.blocks import Block, Cell, Chart, Section, Table, Text, number
from polyclinic.report.comparison_evidence import ComparisonEvidence, share_recovered
from polyclinic.report.sections import scores
from polyclinic.report.theme import Theme, legend, plain, tidy
from polyclinic.report.words import LOWER, metric_name


def picture(found: ComparisonEvidence) -> Section:
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
        axes.set_xlim(min(sizes.min() / 3, sizes.max() / 30), max(sizes.max() * 6, sizes.min() * 60))
        for i, (method, value, _, share) in enumerate(rows):
            area = 60 + 520 * (share or 0)
            style = {"edgecolors": theme.ink, "linewidths": 1.2}
            colour = theme.colour(2) if share == 0 else theme.colour(1)
            face = {"facecolors": "none"} if share is None else {"color": colour, "alpha": 0.85}
            axes.scatter([sizes[i]], [value], s=area, marker="o", **face | style)
            words = plain(method) + ("" if share is None else f" ({share:.0%})")
            beside = {"xytext": (area**0.5 / 2 + 4, (4, -10, 14, -20)[i % 4]), "textcoords": "offset points"}
            axes.annotate(words, (sizes[i], value), fontsize=8.5, color=theme.ink, **beside)
        # bytes in words: no powers of ten, and none of matplotlib's formulas
        axes.xaxis.set_major_formatter(lambda value, _: human_bytes(value))
        axes.xaxis.set_minor_formatter(lambda *_: "")
        axes.margins(y=0.15)
        better = "lower" if found.metric in LOWER else "higher"
        tidy(axes, theme, x="carried in a run", y=f"test {metric_name(found.metric)}{unit}, {better} is better")

    return draw


def side_by_side(found: ComparisonEvidence) -> Section:
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
               f"p against {found.baseline}")  # fmt: skip
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


def by_site(found: ComparisonEvidence) -> Section | None:
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


def curves(found: ComparisonEvidence) -> Section | None:
    """Validation metric by round, the first run of each method."""
    lines_of = {}
    for method, runs in found.runs.items():
        lines = [line for line in runs[0].history if line.get("validation")] if runs else []
        points = [(line["round"], line["validation"].get("pooled", {}).get(found.metric)) for line in lines]
        if known := [(r, float(v)) for r, v in points if isinstance(v, int | float)]:
            lines_of[method] = known
    if not lines_of:
        return None
    rows = [[method, r, v] for method, points in lines_of.items() for r, v in points]

    def draw(figure: Any, theme: Theme) -> None:
        axes = figure.subplots()
        for i, (method, points) in enumerate(lines_of.items()):
            axes.plot(
                *zip(*points, strict=True), label=plain(method), marker=theme.marker(i), markersize=3, **theme.line(i)
            )
        axes.xaxis.get_major_locator().set_params(integer=True)
        tidy(axes, theme, x="round", y=f"validation {metric_name(found.metric)}")
        legend(axes, theme, loc="upper left", bbox_to_anchor=(1, 1))

    table = Table(("method", "round", metric_name(found.metric)), rows)
    chart = Chart("curves", "Validation scores by round", draw, table, "The first run of each method.")
    return Section("course", "How training went", [chart])
