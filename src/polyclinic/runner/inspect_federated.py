"""Statistics of a study's simulated sites, by the same questions, gates and sums as at deployed ones."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from polyclinic.json_types import JsonMapping, JsonObject
from polyclinic.runner.run import run
from polyclinic.study import Study, parse_study

if TYPE_CHECKING:
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
    """Labels of each site, or of all together where only totals are known, and how they differ. No image is shown."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from polyclinic.data.plots import CLASS_COLOURS, INK

    rows = {site: one["labels"] for site, one in found["per_site"].items()} or {"all sites": found["total"]["labels"]}
    names = found["classes"] or [str(number) for number in range(len(next(iter(rows.values()))))]
    figure = Figure(figsize=(9, 1.8 + 0.5 * len(rows)), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    left = np.zeros(len(rows))
    for number, name in enumerate(names):
        counts = np.array([max(labels[number], 0) for labels in rows.values()], float)
        colour = CLASS_COLOURS[number % len(CLASS_COLOURS)]
        axes.barh(list(rows), counts, left=left, color=colour, label=name, edgecolor="white", linewidth=0.5)
        left += counts
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("training images" + ("" if found["classes"] else ", by bins of the label's value"))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if found["classes"] and len(names) <= len(CLASS_COLOURS):
        axes.legend(frameon=False, ncols=min(4, len(names)), loc="upper left", bbox_to_anchor=(0, -0.25))
    known = "" if found["mean_ks"] is None else f"; mean KS between sites {found['mean_ks']:.2f}"
    figure.suptitle(f"{title}: {len(rows)} site{'s' if len(rows) > 1 else ''}{known}", x=0.01, ha="left", color=INK)
    return figure
