"""How good the model is: metrics of all sites and of each, with intervals; sub-groups by a column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from polyclinic.json_types import JsonMapping
from polyclinic.palette import Palette
from polyclinic.report.blocks import Block, Cell, Chart, Section, Table, Text
from polyclinic.report.evidence import RunEvidence
from polyclinic.report.metric_names import metric_name
from polyclinic.report.theme import plain, tidy
from polyclinic.runner.evaluate.case_statistics import FEWEST, intervals_of, metrics_of
from polyclinic.runner.run.result_display import few_images, image_counts

ALL = "all sites together"
#: groups of a column that are shown, the largest first
MOST_GROUPS = 24


def section(run: RunEvidence) -> Section:
    scores = run.scores
    if not scores["pooled"]:
        return Section("scores", "How good the model is", [Text("Nothing was evaluated.")])
    blocks: list[Block] = [Text(_basis(run)), _table(run)]
    rows = _rows_with_intervals(run)
    if rows:
        blocks.append(
            forest(f"scores-{run.metric}", f"{_title(run.metric)} with 95 % intervals", run.metric, rows, run.unit)
        )
    blocks.append(Text(_limits(run), "note"))
    return Section("scores", "How good the model is", blocks)


def _title(name: str) -> str:
    words = metric_name(name)
    return words[:1].upper() + words[1:]


def _basis(run: RunEvidence) -> str:
    if run.personal:
        return (
            "Each site has a model of its own. 'All sites together' is the mean over the models, each on the images of "
            "all sites; a site's row is its own model on its own images."
        )
    return f"One model, on {run.split} images: of all sites together, as a mean over sites, and of each site."


def _limits(run: RunEvidence) -> str:
    parts = []
    if run.result["metrics"].get("intervals", {}).get("pooled"):
        unit = run.result["metrics"]["intervals"]["unit"]
        parts.append(f"Intervals are a bootstrap over {unit}s: they say how sure a figure is for patients like these.")
        parts.append(f"A site with fewer than {FEWEST} {unit}s has none.")
        parts.append("An interval without width comes from images that are all alike, and is no certainty.")
        if run.like == "classification":
            parts.append(
                "The AUC of the table is counted in bins; that of intervals and curves is exact. They differ a little."
            )
    if run.split == "validation":
        parts.append("Validation images also chose the round: such figures are too good.")
    if few := few_images(image_counts(run.result, run.split), run.scores["per_site"]):
        parts.append(f"{few[:1].upper()}{few[1:]}.")
    parts.append("They do not say how the model does at another hospital.")
    return " ".join(parts)


def _table(run: RunEvidence) -> Table:
    scores, calibration = run.scores, run.result["metrics"].get("calibration", {})
    names = list(scores["pooled"])
    extra = list(calibration.get("pooled", {}))
    # of models of each site the calibration is of each image by its own site's model: not what this row is about
    of_all = {} if run.personal else calibration.get("pooled", {})
    counts = image_counts(run.result, run.split)
    rows: list[list[Cell]] = [
        [ALL, sum(counts.values()) or None, *_values(scores["pooled"], names), *_values(of_all, extra)],
        ["mean over sites", None, *_values(scores["mean"], names), *(None for _ in extra)],
    ]
    for site, own in scores["per_site"].items():
        found = calibration.get("per_site", {}).get(site, {})
        rows.append([site, counts.get(site), *_values(own, names), *_values(found, extra)])
    columns = ["", "images", *(metric_name(name) for name in [*names, *extra])]
    return Table(columns, rows, f"Metrics on {run.split} images")


def _values(metrics: JsonMapping, names: list[str]) -> list[Cell]:
    return [float(metrics[name]) if isinstance(metrics.get(name), int | float) else None for name in names]


def _rows_with_intervals(run: RunEvidence) -> dict[str, JsonMapping]:
    intervals = run.result["metrics"].get("intervals", {})
    rows = {ALL if not run.personal else "each by its own model": intervals.get("pooled", {})}
    rows |= dict(intervals.get("per_site", {}))
    return {name: own[run.metric] for name, own in rows.items() if run.metric in own}


def forest(
    key: str, title: str, metric: str, rows: Mapping[str, Mapping[str, float]], unit: str = "", note: str = ""
) -> Chart:
    """A value with its interval for each row."""
    few = dict(list(rows.items())[:40])
    table = Table(
        ("", metric_name(metric), "low", "high"),
        [[name, *(float(one[key]) for key in ("value", "low", "high"))] for name, one in rows.items()],
    )

    def draw(figure: Any, theme: Palette) -> None:
        axes = figure.subplots()
        for y, one in enumerate(few.values()):
            axes.plot([one["low"], one["high"]], [y, y], color=theme.colour(0), linewidth=2.2, solid_capstyle="round")
            axes.plot([one["value"]], [y], marker="o" if y else "D", color=theme.colour(1), markersize=6)
        axes.set_yticks(range(len(few)), [plain(name) for name in few])
        axes.set_ylim(len(few) - 0.5, -0.5)
        tidy(axes, theme, x=f"{metric_name(metric)}{f' ({plain(unit)})' if unit else ''}", grid="x")

    return Chart(key, title, draw, table, note, (6.4, 1.1 + 0.3 * len(few)))


def subgroups(run: RunEvidence, column: str) -> Section:
    """Metrics of the images that share a value of a column."""
    title = f"By {column}"
    cases = run.judged
    if cases is None:
        words = "The run kept no predictions of single images, so there are no sub-groups. Deployed runs keep none."
        return Section(f"by-{column}", title, [Text(words)])
    values = cases.column(column)
    names, counts = np.unique(values, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:MOST_GROUPS]
    parts = {str(names[i]): cases.take(np.flatnonzero(values == names[i])) for i in order}
    found = {name: metrics_of(part) for name, part in parts.items()}
    metrics = list(dict.fromkeys(metric for one in found.values() for metric in one))
    intervals = {name: intervals_of(part, ("by", column, name)) for name, part in parts.items()}
    rows = [[name, len(parts[name]), *(one.get(metric) for metric in metrics)] for name, one in found.items()]
    blocks: list[Block] = [
        Table((column, "images", *map(metric_name, metrics)), rows, f"{run.split} images by {column}")
    ]
    known = {name: vars(own[run.metric]) for name, own in intervals.items() if run.metric in own}
    if known:
        blocks.append(forest(f"by-{column}", f"{_title(run.metric)} by {column}", run.metric, known, run.unit))
    many = f" The {MOST_GROUPS} largest of {len(names)} groups are shown." if len(names) > MOST_GROUPS else ""
    note = f"Groups with fewer than {FEWEST} patients have no interval. Many groups: some differ by chance alone.{many}"
    return Section(f"by-{column}", title, [*blocks, Text(note, "note")])
