"""`claim.png`: the paper's numbers beside ours, as bars, or as curves where the labels are numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from polyclinic.files import atomic_file
from polyclinic.json_types import JsonObject

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: ours, and the paper's
COLOURS = {"ours": "#2a6f97", "paper": "#bbbbbb"}
MOST_PANELS = 4


def draw(found: JsonObject, file: Path) -> None:
    """One panel for each metric; error bars are standard deviations over seeds."""
    from matplotlib.figure import Figure

    told = {row["metric"] for row in found["paper_numbers"]}
    metrics = list(dict.fromkeys(row["metric"] for row in found["ours"]))
    metrics = sorted(metrics, key=lambda metric: metric not in told)[:MOST_PANELS]  # first what the paper has
    labels = list(dict.fromkeys(row["label"] for row in found["ours"]))
    width = max(3.2, 1.2 + 0.55 * len(labels))
    figure = Figure(figsize=(width * max(1, len(metrics)), 4.0), layout="constrained")
    panels = figure.subplots(1, max(1, len(metrics)), squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=False):
        _panel(axes, found, metric, labels)
    figure.suptitle(f"{found['paper']}, {found['place']}. Holds: {found['holds']}", fontsize=10)
    handles, names = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    with atomic_file(file) as partial:
        figure.savefig(partial, dpi=120, format="png")


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
