"""`comparison.png`: a bar for each method of a comparison with its deviation; several comparisons beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

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
        bars = [(x, value["mean"], value["std"]) for x, value in zip(at, found, strict=True) if value]
        if bars:
            x, mean, std = zip(*bars, strict=True)
            axes.bar(x, mean, width, yerr=std, capsize=3, label=method, color=f"C{place % 10}", alpha=0.85)
    axes.set_xticks(range(len(groups)), list(groups))
    measured = task.metric.replace("_", " ") + (f", {unit}," if unit and task.metric in IN_UNITS else "")
    axes.set_ylabel(f"{measured} on test images ({task.better} is better)")
    axes.set_title(_title(groups, task.metric), fontsize=9, loc="left")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside right upper", frameon=False)
    with atomic_file(file) as partial:
        figure.savefig(partial, dpi=120, format="png")


def _title(groups: Mapping[str, JsonObject], metric: str) -> str:
    """What the bars are, and how many runs they stand for."""
    key = f"test_{metric}"
    counts = sorted({group[method][key]["n"] for group in groups.values() for method in group if key in group[method]})
    if counts in ([], [1]):
        return "One run of each method"
    runs = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"Mean of {runs} runs of each method\nlines: ± standard deviation"
