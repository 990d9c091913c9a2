"""Statistics of a study's simulated sites, by the same questions, gates and sums as at deployed ones."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from polyclinic.json_types import JsonMapping, JsonObject
from polyclinic.palette import INK, LIGHT, SERIES
from polyclinic.runner.run.run import run
from polyclinic.study import Study, parse_study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: tables that a study has for training, and a question has no use for
FOR_TRAINING = ("replay", "tuning", "privacy", "defence", "audit", "generator", "optimizer")


def as_question(study: Study, name: str, **changes: object) -> Study:
    """The study with a question in the place of its method: nothing is trained, and nothing scored but what it asks."""
    tables = {table: value for table, value in study.as_tables().items() if table not in FOR_TRAINING}
    tables["method"] = {"name": name}
    tables["model"] = {**tables["model"], "cut": None}
    tables["model"] = {setting: value for setting, value in tables["model"].items() if value is not None}
    for path, value in changes.items():
        table, _, setting = path.partition("__")
        tables[table] = {**tables.get(table, {}), setting: value}
    return parse_study(tables)


def inspection_of(study: Study) -> Study:
    """The study that asks its sites for counts."""
    return as_question(study, "inspect", evaluation__every=0, evaluation__final="none", evaluation__select="last")


def inspect_federated(study: Study, *, cache: Path | None = None) -> JsonObject:
    """What the coordinator of this study would learn by `polyclinic deploy inspect`."""
    with tempfile.TemporaryDirectory() as folder:
        return run(inspection_of(study), Path(folder) / "run", cache=cache).values["inspect"]


def draw_inspection(found: JsonMapping, title: str) -> Figure:
    """Labels, intensities, sizes and spacings of each site, or of all together where only totals are known. No image is
    shown."""
    from matplotlib.figure import Figure

    rows = found["per_site"] or {"all sites": found["total"]}
    figure = Figure(figsize=(11, 3.2 + 0.9 * len(rows)), facecolor="white", layout="constrained")
    axes = figure.subplots(2, 2)
    _draw_labels(axes[0, 0], rows, found["classes"])
    low, high = 0, 255
    names = [f"{low + (high - low) * n // 16}" for n in range(16)]
    _draw_shares(axes[0, 1], rows, "intensities", names, "mean intensity of an image (0 to 255), lower edge of the bin")
    sides = ["0", *(f"{edge:g}" for edge in found["sides"])]
    _draw_shares(axes[1, 0], rows, "sides", sides, "longer side of an image in pixels, lower edge of the bin")
    spacings = ["0", *(f"{edge:g}" for edge in found["spacings"]), "unknown"]
    _draw_shares(axes[1, 1], rows, "spacings", spacings, "distance of pixels in mm, lower edge of the bin")
    known = "" if found["mean_ks"] is None else f"; mean KS of labels {found['mean_ks']:.2f}"
    count = len(found["per_site"])
    sites = f"{count} site{'s' if count > 1 else ''}" if count else "totals over all sites"
    figure.suptitle(f"{title}: {sites}{known}", x=0.01, ha="left", color=INK)
    return figure


def _draw_labels(axes: Axes, rows: JsonMapping, classes: list[str]) -> None:
    from matplotlib.ticker import MaxNLocator

    names = classes or [str(number) for number in range(len(next(iter(rows.values()))["labels"]))]
    left = np.zeros(len(rows))
    for number, name in enumerate(names):
        counts = np.array([max(one["labels"][number], 0) for one in rows.values()], float)
        colour = LIGHT.colour(number)
        axes.barh(list(rows), counts, left=left, color=colour, label=name, edgecolor="white", linewidth=0.5)
        left += counts
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("training images" + ("" if classes else ", by bins of the label's value"))
    axes.spines[["top", "right"]].set_visible(False)
    if classes and len(names) <= len(SERIES):
        axes.legend(frameon=False, ncols=min(4, len(names)), loc="lower left", bbox_to_anchor=(0, 1.0))


def _draw_shares(axes: Axes, rows: JsonMapping, table: str, names: list[str], label: str) -> None:
    """One row of cells a site: the darker, the larger the share of its images; nothing where a count is not told."""
    counts = np.array([[max(count, 0) for count in one[table]] for one in rows.values()], float)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for (row, column), share in np.ndenumerate(shares):
        if share >= 0.005:
            axes.text(
                column,
                row,
                f"{share:.0%}",
                ha="center",
                va="center",
                fontsize=7,
                color="black" if share < 0.6 else "white",
            )
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xticks(range(len(names)), names, fontsize=7)
    axes.set_xlabel(label)
