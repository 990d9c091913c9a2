"""`comparison.png`: a bar for each method of a comparison with its deviation; several comparisons beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyclinic.files import atomic_file
from polyclinic.json_types import JsonObject
from polyclinic.tasks.regression import IN_UNITS

if TYPE_CHECKING:
    from polyclinic.tasks import Task

#: how much of the width from one group of bars to the next the bars take
FILLED = 0.8


def draw(summaries: Mapping[str, JsonObject], task: Task, file: Path, unit: str = "") -> None:
    """Draw the task's metric on the test images of all sites, mean and standard deviation over runs.

    `summaries` are those of comparisons, by the name of their group of bars; `unit` is that of the label.
    """
    from matplotlib.figure import Figure  # here: a command that draws nothing need not wait for it

    groups = {name: summary["methods"] for name, summary in summaries.items() if summary["methods"]}
    methods = list(dict.fromkeys(method for group in groups.values() for method in group))
    figure = Figure(figsize=(max(5.0, 1.5 + 0.5 * len(methods) * len(groups)), 4.2), layout="constrained")
    axes = figure.subplots()
    width = FILLED / len(methods)
    for place, method in enumerate(methods):
        at = [number + (place - (len(methods) - 1) / 2) * width for number in range(len(groups))]
        found = [group.get(method, {}).get(f"test_{task.metric}") for group in groups.values()]
        bars = [(x, value) for x, value in zip(at, found, strict=True) if value]
        if bars:
            axes.bar([x for x, _ in bars], [value["mean"] for _, value in bars], width, label=method, **_style(place))
        lines = [(x, value["mean"], value["std"]) for x, value in bars if value["n"] > 1]
        if lines:
            x, mean, std = zip(*lines, strict=True)
            axes.errorbar(x, mean, std, fmt="none", ecolor="black", capsize=3)
    _guess(axes, summaries, task.metric)
    if len(groups) == 1:  # the names of methods stand under their bars, and no legend is needed
        places = [(place - (len(methods) - 1) / 2) * width for place in range(len(methods))]
        axes.set_xticks(places, methods, rotation=20 if len(methods) > 4 else 0)
    else:
        axes.set_xticks(range(len(groups)), list(groups))
        figure.legend(loc="outside right upper", frameon=False)
    measured = task.metric.replace("_", " ") + (f", {unit}," if unit and task.metric in IN_UNITS else "")
    axes.set_ylabel(f"{measured} on test images ({task.better} is better)")
    axes.set_title(_title(groups, task.metric), fontsize=9, loc="left")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    with atomic_file(file) as partial:
        figure.savefig(partial, dpi=120, format="png")


def _style(place: int) -> dict[str, Any]:
    return {"color": f"C{place % 10}", "alpha": 0.85, "edgecolor": "white"}


def _guess(axes: Any, summaries: Mapping[str, JsonObject], metric: str) -> None:
    """A line at what somebody reaches who has seen no image; where comparisons differ in it, none."""
    known = {(one.get("without_images") or {}).get(metric) for one in summaries.values()}
    if len(known) == 1 and None not in known:
        (value,) = known
        axes.axhline(value, color="0.3", linestyle="--", linewidth=1)
        axes.annotate(
            " a guess without images", (0, value), xycoords=("axes fraction", "data"), va="bottom", fontsize=8
        )


def _title(groups: Mapping[str, JsonObject], metric: str) -> str:
    """What the bars are, and how many runs they stand for."""
    key = f"test_{metric}"
    counts = sorted({group[method][key]["n"] for group in groups.values() for method in group if key in group[method]})
    if counts in ([], [1]):
        return "One run of each method"
    runs = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"Mean of {runs} runs of each method\nlines: ± standard deviation"
