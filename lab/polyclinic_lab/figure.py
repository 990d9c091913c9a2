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
COLOURS = {"ours": "C0", "paper": "0.75"}
MOST_PANELS = 4
#: a metric that is a point of a curve, such as "epsilon after 50 epochs"
POINT = re.compile(r"(?P<what>.+) after (?P<place>\d+) (?P<unit>\w+)")
#: a label that is a point of a curve, such as "fedavg, 6 sites"
COUNTED = re.compile(r"(?P<what>.+), (?P<place>\d+) (?P<unit>sites|percent)")


def draw(found: JsonObject, file: Path) -> None:
    """A panel for each curve, then one for each metric; error bars are standard deviations over seeds."""
    from matplotlib.figure import Figure

    curves = list(dict.fromkeys(match["what"] for row in found["ours"] if (match := POINT.fullmatch(row["metric"]))))
    metrics = shown_metrics(found)[: max(0, MOST_PANELS - len(curves))]
    labels = list(dict.fromkeys(row["label"] for row in found["ours"]))
    widths = [4.2] * len(curves) + [max(3.2, 1.2 + 0.55 * len(labels))] * len(metrics)
    figure = Figure(figsize=(sum(widths) or 3.2, 4.0), layout="constrained")
    panels = figure.subplots(1, max(1, len(widths)), squeeze=False, width_ratios=widths or [1.0])[0]
    for axes, what in zip(panels, curves, strict=False):
        _curves(axes, found, what, labels)
    panel = _by_count if all(COUNTED.fullmatch(label) for label in labels) else _panel
    for axes, metric in zip(panels[len(curves) :], metrics, strict=False):
        panel(axes, found, metric, labels)
    stop = f"\n{found.get('claim', '')}." if found["place"].endswith("?") else "."
    figure.suptitle(f"{found['paper']}, {found['place']}{stop} Verdict: {found['verdict']}", fontsize=10)
    told = {name: handle for axes in panels for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    columns = min(3, max(1, int(sum(widths) // 2)))  # a narrow figure would cut a wide legend off
    if told:
        figure.legend(told.values(), told.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
    with atomic_file(file) as partial:
        figure.savefig(partial, dpi=120, format="png")


def shown_metrics(found: JsonObject) -> list[str]:
    """The metrics that get bars: first those of the rule, then those that the paper has, then those about the same
    training set as the rule's (", augmented"); points are of curves."""
    told = {row["metric"] for row in found["paper_numbers"]}
    metrics = dict.fromkeys(row["metric"] for row in found["ours"] if not POINT.fullmatch(row["metric"]))

    def place(metric: str) -> tuple[bool, bool, bool]:
        return f"{metric} of " not in found["rule"], metric not in told, metric.rpartition(", ")[2] not in found["rule"]

    return sorted(metrics, key=place)[:MOST_PANELS]


def _curves(axes: Axes, found: JsonObject, what: str, labels: list[str]) -> None:
    """A curve for each label, as Fig. 7 of Qu and Figs. 8 to 10 of FELICIA have them; crosses are the paper's."""
    for number, label in enumerate(labels):
        for side, marker in (("ours", "o-"), ("paper_numbers", "x")):
            points = sorted(_points(found[side], label, what))
            name = f"{label}{'' if side == 'ours' else ', the paper'}"
            if points:
                places, means, spreads = zip(*points, strict=True)
                axes.errorbar(places, means, spreads, fmt=marker, capsize=2, color=f"C{number}", label=name)
    matches = filter(None, (POINT.fullmatch(row["metric"]) for row in found["ours"]))
    units = {match["unit"] for match in matches if match["what"] == what}
    axes.set_xlabel(", ".join(sorted(units)))
    axes.set_title(what, fontsize=9)
    axes.grid(alpha=0.3)


def _by_count(axes: Axes, found: JsonObject, metric: str, labels: list[str]) -> None:
    """A curve for each method over the number of sites, as Fig. 2 of FedER has it."""
    curves: dict[str, list[tuple[int, float, float]]] = {}
    for row in found["ours"]:
        match = COUNTED.fullmatch(row["label"])
        if match and row["metric"] == metric:
            curves.setdefault(match["what"], []).append((int(match["place"]), row["mean"], row["std"] or 0.0))
    for name, points in curves.items():
        places, means, spreads = zip(*sorted(points), strict=True)
        axes.errorbar(places, means, spreads, fmt="o-", capsize=2, label=name)
    axes.set_xlabel("sites")
    axes.set_title(metric, fontsize=9)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _points(rows: list[JsonObject], label: str, what: str) -> Iterator[tuple[float, float, float]]:
    for row in rows:
        match = POINT.fullmatch(row["metric"])
        if match and row["label"] == label and match["what"] == what:
            yield float(match["place"]), row["mean"], row["std"] or 0.0


def _draw_real(axes: Axes, found: JsonObject, metric: str) -> None:
    """A dashed line where real images alone lead, as Figs. 6 and 8 of FELICIA have it; nothing if that is not known."""
    name = f"{metric.rpartition(', ')[0]}, real"
    known = [row["mean"] for row in found["ours"] if row["metric"] == name]
    if known and name != metric:
        axes.axhline(sum(known) / len(known), color="black", linestyle="--", linewidth=1, label="real images alone")


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
    _draw_real(axes, found, metric)
    if found["axis"]:
        axes.set_xlabel(found["axis"])
    else:
        axes.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
        axes.set_xlim(-0.6, len(labels) - 0.4)  # also where some labels have no bar
    means = [row["mean"] for rows in sides.values() for row in rows if row["metric"] == metric]
    if not any(means):
        axes.set_ylim(0, 1)
    elif min(means) >= 0:  # a deviation may be larger than the mean of a share
        axes.set_ylim(bottom=0)
    axes.set_title(metric, fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
