"""Privacy-utility grid of defences: the study with each of them, its utility beside what an attack recovers."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyclinic.audits.audit import audit, write_file
from polyclinic.audits.open_run import read_study
from polyclinic.audits.verdicts import gravest
from polyclinic.data.own_images import find_kit
from polyclinic.errors import BadInput
from polyclinic.extras import picture_if_possible
from polyclinic.models import cuts
from polyclinic.palette import FAINT, INK, VERDICTS
from polyclinic.runner.run.run import run
from polyclinic.study import Study, parse_study
from polyclinic.study.tables import Audit

#: (what is being done, variations done, variations in all)
Progress = Callable[[str, int, int], None]

CLOSE = 0.02  # of a picture's side: points that cover each other

#: settings of each variation of a defence that sites apply to their updates
ON_UPDATES: dict[str, dict[str, dict[str, Any]]] = {
    "sparsify": {
        "sparsified to 10 %": {"defence.name": "sparsify", "defence.keep": 0.1},
        "sparsified to 1 %": {"defence.name": "sparsify", "defence.keep": 0.01},
    },
    "prune": {"90 % pruned": {"defence.name": "prune", "defence.fraction": 0.9}},
    "quantise": {"8 bits": {"defence.name": "quantise", "defence.bits": 8}},
    "secure-sum": {"secure sum": {"audit.secure_sum": True}},
}


def grid(
    folder: str | Path,
    *,
    budget: str = "quick",
    device: str = "auto",
    plugins: Sequence[str] = (),
    progress: Progress | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Run and audit the study of a run folder with each defence that fits it; the content of `grid.json`.

    Each variation is a run folder in `grid/`; one that is there already is not run again.
    """
    folder = Path(folder)
    if find_kit(folder):
        raise BadInput("--grid: runs the study again with all its sites, which one site cannot; leave --grid out")
    study = read_study(folder, None, plugins)
    wanted = variations(study)
    report: dict[str, Any] = {
        # of classes the area under the curve, which needs no threshold
        "metric": "auc" if study.task.like == "classification" else study.task.metric,
        "better": study.task.better,
        "complete": False,
        "points": [],
    }
    for done, (name, changed) in enumerate(wanted.items()):
        if progress:
            progress(name, done, len(wanted))
        where = folder / "grid" / name.replace(" ", "-").replace("%", "percent")
        result = run(changed, where, resume=(where / "study.toml").exists(), cache=cache)
        names = list(result["data"]["counts"])
        found = audit(where, budget=budget, sites=names, device=device, cache=cache)
        report["points"].append(grid_point(name, report["metric"], result.values, found))
        report["complete"] = done + 1 == len(wanted)
        write_file(folder / "grid.json", json.dumps(report, indent=2) + "\n")
        with picture_if_possible():
            draw_grid(report, folder / "grid.png")
    if progress:
        progress("done", len(wanted), len(wanted))
    return report


def variations(study: Study) -> dict[str, Study]:
    """The study without any defence, and with each one that fits its method, by a name of their own."""
    tables = study.as_tables()
    privacy = tables.pop("privacy", None)
    tables.pop("defence", None)
    plain = parse_study({**tables, "audit": {**tables.get("audit", {}), "keep_parcels": 0, "secure_sum": False}})
    wanted = (study.audit or Audit()).defences
    found = {"no defence": plain}
    if "classifier" in study.method.traits.private_networks:  # its sites release updates
        for name in wanted:
            if name == "secure-sum" and not study.method.SUMMED:
                continue  # one site after the other: there is nothing to add up
            found |= {title: plain.with_settings(changed) for title, changed in ON_UPDATES.get(name, {}).items()}
        if "clip-and-noise" in wanted:
            found |= _with_privacy(plain, privacy)
    if "deeper-cut" in wanted and study.method.traits.needs_cut:
        every = cuts(study.model.backbone)
        deeper = every[every.index(study.cut) + 1 :] if study.cut in every else ()
        found |= {f"cut at {cut}": plain.with_settings({"model.cut": cut}) for cut in deeper}
    if len(found) == 1:
        raise BadInput(f"audit.defences: none of {', '.join(wanted)} fits '{study.method.name}'; choose another method")
    return found


def _with_privacy(plain: Study, privacy: Mapping[str, Any] | None) -> dict[str, Study]:
    """DP-SGD as the study has it, else with the papers' noise; with group norm where batch norm forbids it."""
    settings = {f"privacy.{name}": value for name, value in (privacy or {"noise_multiplier": 0.7}).items()}
    for norm in ({}, {"model.norm": "group"}):
        try:
            title = "clip and noise" + (", group norm" if norm else "")
            return {title: plain.with_settings({**settings, **norm})}
        except BadInput:
            continue
    return {}


# --- what is written ----------------------------------------------------------------------------------


def grid_point(name: str, metric: str, result: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    """Utility and leakage of one variation: how much better than a guess reconstructions are, and the verdict."""
    findings = [f for parcel in report["parcels"] for f in parcel["findings"]]
    images = [f["evidence"] for f in findings if "psnr" in f["evidence"]]
    areas = [f["evidence"]["auc"] for f in findings if "auc" in f["evidence"]]
    return {
        "defence": name, "utility": result["metrics"]["test"].get(metric),
        "psnr": _mean([one["psnr"] for one in images]),
        "psnr_of_guess": _mean([one["psnr_of_guess"] for one in images]),
        "recovered": sum(one["recovered"] for one in images), "told": sum(one["told"] for one in images),
        "images": sum(one["images"] for one in images), "membership_auc": _mean(areas),
        "epsilon": (result.get("privacy") or {}).get("epsilon"),
        "leaks": sorted({f["attack"] for f in findings if f["verdict"] == "leaks"}),
        "verdict": gravest([one["verdict"] for one in report["verdicts"].values() if one.get("attacked")]),
    }  # fmt: skip


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def merge_overlapping(places: Sequence[tuple[float, float]], numbers: Sequence[int]) -> list[tuple[str, float, float]]:
    """Labels of points and where to write them: points that cover each other share one label."""
    spans = [max(values) - min(values) or 1.0 for values in zip(*places, strict=True)]
    texts: list[tuple[str, float, float]] = []
    for (x, y), number in zip(places, numbers, strict=True):
        near = [i for i, (_, a, b) in enumerate(texts) if max(abs(x - a) / spans[0], abs(y - b) / spans[1]) < CLOSE]
        if near:
            text, a, b = texts[near[0]]
            texts[near[0]] = (f"{text},{number}", a, b)
        else:
            texts.append((str(number), x, y))
    return texts


def draw_grid(report: Mapping[str, Any], path: Path) -> None:
    """Utility over leakage, a numbered point for each defence; right of the line an attack beats the best guess.

    No picture where no defence has both."""
    drawn = [
        (number, one["psnr"] - one["psnr_of_guess"], one["utility"], one)
        for number, one in enumerate(report["points"], 1)
        if one["psnr"] is not None and one["utility"] is not None
    ]
    if not drawn:
        return
    from matplotlib.figure import Figure  # here: not everybody has it

    figure = Figure(figsize=(9, 4.6), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for number, x, y, one in drawn:
        colour, label = VERDICTS[one["verdict"]], f"{number}  {one['defence']}"
        axes.scatter(x, y, s=230, color=colour, edgecolor="white", zorder=3, label=label)
    for text, x, y in merge_overlapping([(x, y) for _, x, y, _ in drawn], [number for number, *_ in drawn]):
        axes.text(x, y, text, color="white", fontsize=9 if len(text) < 3 else 6, ha="center", va="center", zorder=4)
    axes.axvline(0, color=FAINT, linestyle="--", linewidth=1)
    axes.margins(x=0.08, y=0.12)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("leakage: PSNR of reconstructions above the best guess without the parcel, in dB", color=INK)
    better = "" if report["better"] == "higher" else " (lower is better)"
    axes.set_ylabel(f"utility: {report['metric']} on test images{better}", color=INK)
    words = f"{len(drawn)} defences; red: leaks, green: withstood, amber: not tested"
    axes.set_title(words, fontsize=10, color=INK, loc="left")
    figure.legend(loc="outside right center", frameon=False, handlelength=1, markerscale=0.5)
    figure.savefig(path, dpi=130)
