"""`claim.png`: the paper's numbers beside ours, as bars, or as curves where labels or metrics have numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from polyclinic.files import atomic_file
from polyclinic.json_types import JsonObject

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: ours, and the paper's
COLOURS = {"ours": "#2a6f97", "paper": "#bbbbbb"}
MOST_PANELS = 4
#: a metric that is a point of a curve, such as "epsilon after 50 epochs"
POINT = re.compile(r"(?P<what>.+) after (?P<place>\d+) (?P<unit>\w+)")


def draw(found: JsonObject, file: Path) -> None:
    """One panel for each metric; error bars are standard deviations over seeds."""
    from matplotlib.figure import Figure

    curves = all(POINT.fullmatch(row["metric"]) for row in found["ours"])
    metrics = [] if curves else shown_metrics(found)
    labels = list(dict.fromkeys(row["label"] for row in found["ours"]))
    width = max(3.2, 1.2 + 0.55 * len(labels))
    figure = Figure(figsize=(width * max(1, len(metrics)) + curves, 4.0), layout="constrained")
    panels = figure.subplots(1, max(1, len(metrics)), squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=False):
        _panel(axes, found, metric, labels)
    if curves:
        _curves(panels[0], found, labels)
    stop = "" if found["place"].endswith("?") else "."
    figure.suptitle(f"{found['paper']}, {found['place']}{stop} Holds: {found['holds']}", fontsize=10)
    handles, names = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    with atomic_file(file) as partial:
        figure.savefig(partial, dpi=120, format="png")


def shown_metrics(found: JsonObject) -> list[str]:
    """The metrics that get a panel: first those of the rule, then those that the paper has."""
    told = {row["metric"] for row in found["paper_numbers"]}
    metrics = dict.fromkeys(row["metric"] for row in found["ours"])
    return sorted(metrics, key=lambda metric: (f"{metric} of " not in found["rule"], metric not in told))[:MOST_PANELS]


def _curves(axes: Axes, found: JsonObject, labels: list[str]) -> None:
    """A curve for each label, as Fig. 7 of Qu has them; crosses are the paper's."""
    for number, label in enumerate(labels):
        for side, marker in (("ours", "o-"), ("paper_numbers", "x")):
            points = sorted(_points(found[side], label))
            name = f"{label}{'' if side == 'ours' else ', the paper'}"
            if points:
                axes.plot(*zip(*points, strict=True), marker, color=f"C{number}", markersize=7, label=name)
    match = POINT.fullmatch(found["ours"][0]["metric"])
    assert match, "draw has looked"
    axes.set_xlabel(match["unit"])
    axes.set_ylabel(match["what"])
    axes.grid(alpha=0.3)


def _points(rows: list[JsonObject], label: str) -> Iterator[tuple[float, float]]:
    for row in rows:
        match = POINT.fullmatch(row["metric"])
        if match and row["label"] == label:
            yield float(match["place"]), row["mean"]


def _panel(axes: Axes, found: JsonObject, metric: str, labels: list[str]) -> None:
    sides = {"ours": found["ours"], "paper": found["paper_numbers"]}
    told = any(row["metric"] == metric for row in sides["paper"])
    for side, rows in sides.items():
        mine = {row["label"]: row for row in rows if row["metric"] == metric}
        shown = [label for label in labels if label in mine]
        if not shown:
            continue
        means = [mine[label]["mean"] for label in shown]
        spreads = [mine[label]["std"] or 0.0 for label in shown]
        if found["axis"]:
            axes.errorbar(
                [float(label) for label in shown], means, spreads, color=COLOURS[side], marker="o", label=side
            )
        else:
            shift = (-0.2 if side == "paper" else 0.2) if told else 0.0
            places = [labels.index(label) + shift for label in shown]
            axes.bar(places, means, 0.38, yerr=spreads, capsize=2, color=COLOURS[side], label=side)
    if found["axis"]:
        axes.set_xlabel(found["axis"])
    else:
        axes.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
    if all(row["mean"] == 0 for row in found["ours"] if row["metric"] == metric):
        axes.set_ylim(0, 1)
    axes.set_title(metric, fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
