"""Statistics of a study's simulated sites, by the same questions, gates and sums as at deployed ones."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from polyclinic.errors import BadInput
from polyclinic.json_types import JsonMapping, JsonObject
from polyclinic.methods.analytic import Analytic
from polyclinic.palette import INK, LIGHT, SERIES, heat_map, stacked_bars
from polyclinic.runner.run.run import run
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
    """The study that asks its sites for counts; of volumes, for their fingerprint."""
    name = "fingerprint" if study.data.volumes else "inspect"
    return as_question(study, name, evaluation__every=0, evaluation__final="none", evaluation__select="last")


def inspect_federated(study: Study, *, cache: Path | None = None) -> JsonObject:
    """What the coordinator of this study would learn by `polyclinic deploy inspect`."""
    with tempfile.TemporaryDirectory() as folder:
        return run(inspection_of(study), Path(folder) / "run", cache=cache).values["inspect"]


def question_of_worth(study: Study) -> Study:
    """The study of the method analytic that also asks what each site adds; BadInput for another method."""
    if not isinstance(study.method, Analytic):
        raise BadInput(
            f"method.name: what a site adds follows from the sums of 'analytic', and '{study.method.name}' has none; "
            "set method.name = 'analytic', and model.backbone to an encoder"
        )
    return study.with_settings({"method.worth": True})


def worth(study: Study, *, cache: Path | None = None) -> JsonObject:
    """Leave-one-out and Shapley values of each site, from the sums that simulated sites send."""
    asked = question_of_worth(study).with_settings({"evaluation.every": 0, "evaluation.final": "none"})
    with tempfile.TemporaryDirectory() as folder:
        return run(asked, Path(folder) / "run", cache=cache).values["worth"]


def draw_inspection(found: JsonMapping, title: str) -> "Figure":
    """Labels, intensities, sizes and spacings of each site, or of all together where only totals are known. No image is
    shown; nothing is drawn where a count is not told."""
    from matplotlib.figure import Figure

    rows, classes = found["per_site"] or {"all sites": found["total"]}, found["classes"]
    figure = Figure(figsize=(11, 3.2 + 0.9 * len(rows)), facecolor="white", layout="constrained")
    axes = figure.subplots(2, 2)
    labels = {site: [max(count, 0) for count in one["labels"]] for site, one in rows.items()}
    names = classes or [str(number) for number in range(len(found["total"]["labels"]))]
    stacked_bars(axes[0, 0], LIGHT, labels, names, "training images" + ("" if classes else ", by bins of the value"))
    if not classes or len(names) > len(SERIES):
        axes[0, 0].get_legend().remove()
    tables = {
        "intensities": ([str(255 * n // 16) for n in range(16)], "mean intensity of an image (0 to 255)"),
        "sides": (["0", *(f"{edge:g}" for edge in found["sides"])], "longer side of an image in pixels"),
        "spacings": (["0", *(f"{edge:g}" for edge in found["spacings"]), "unknown"], "distance of pixels in mm"),
    }
    for one, (table, (edges, words)) in zip((axes[0, 1], axes[1, 0], axes[1, 1]), tables.items(), strict=True):
        counts = np.array([[max(count, 0) for count in row[table]] for row in rows.values()], float)
        shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        heat_map(one, LIGHT, np.where(shares >= 0.005, shares, np.nan), (list(rows), edges), form=".0%")
        one.set_xlabel(f"{words}, lower edge of the bin")
    known = "" if found["mean_ks"] is None else f"; mean KS of labels {found['mean_ks']:.2f}"
    count = len(found["per_site"])
    sites = f"{count} site{'s' if count > 1 else ''}" if count else "totals over all sites"
    figure.suptitle(f"{title}: {sites}{known}", x=0.01, ha="left", color=INK)
    return figure
