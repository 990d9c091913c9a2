"""Catastrophic forgetting of a serial method: each site's images under the model after each hand-over (Qu, Table 1)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polyclinic.data.parts import open_site, prepare
from polyclinic.errors import BadInput
from polyclinic.files import atomic_write, read_tensors
from polyclinic.palette import LIGHT, heat_map
from polyclinic.run_folder import check_whole
from polyclinic.runner.run.assembly import Assembly
from polyclinic.study import load_run_study
from polyclinic.tasks.regression import IN_UNITS


def matrices(folder: Path, split: str = "train", plugins: Sequence[str] = ()) -> dict[str, Any]:
    """For each kept round, `table[data site][site that has just trained]` of the task's main metric.

    `plugins`: where the study's plug-ins are now, if they have moved.
    """
    if not (folder / "study.toml").exists():
        raise BadInput(f"{folder}: is not a run folder; name one that `polyclinic run` wrote")
    study = load_run_study(folder, moved=plugins)
    found = [path for path in (folder / "handovers").glob("round-*") if path.name.removeprefix("round-").isdecimal()]
    kept = sorted(found, key=lambda path: int(path.name.split("-")[1]))
    if not kept:
        raise BadInput(
            f"{folder}: has no models that were handed from site to site; run a method whose sites take turns (cwt, "
            "splitnn, cwt-replay) with evaluation.handovers = 'last' or 'all'"
        )
    check_whole(folder, "handovers/*")
    assembly = Assembly(study, prepare(study.data, study.sites), folder)
    return {
        "metric": study.task.metric,
        "better": study.task.better,
        "split": split,
        "unit": assembly.target.unit if study.task.metric in IN_UNITS else "",
        "rounds": {int(path.name.split("-")[1]): _matrix(assembly, path, split) for path in kept},
    }


def _matrix(assembly: Assembly, handovers: Path, split: str) -> dict[str, dict[str, float]]:
    trainer, task = assembly.trainer(), assembly.study.task
    table: dict[str, dict[str, float]] = {site: {} for site in assembly.prepared.names}
    for file in sorted(handovers.glob("*-*.safetensors")):
        trained_last = file.stem.split("-", 1)[1]
        trainer.load({**trainer.initial_local, **read_tensors(file)})
        for site in table:
            part = getattr(open_site(assembly.prepared.folder, site), split)
            if len(part):
                table[site][trained_last] = task.finish(trainer.evaluate(part))[task.metric]
    return table


def draw(found: dict[str, Any], path: Path) -> None:
    """A heat map for each kept round: what each hand-over made of each site's images."""
    from matplotlib.figure import Figure

    rounds, unit = found["rounds"], f" ({found['unit']})" if found.get("unit") else ""
    figure = Figure(figsize=(1.6 + 4.2 * len(rounds), 4.2), layout="constrained")
    values = [v for table in rounds.values() for row in table.values() for v in row.values()]
    for axes, (number, table) in zip(figure.subplots(1, len(rounds), squeeze=False)[0], rounds.items(), strict=True):
        sites = list(table)
        grid = np.array([[table[site].get(turn, np.nan) for turn in sites] for site in sites], dtype=float)
        heat_map(axes, LIGHT, grid, (sites, sites), (min(values), max(values)))
        axes.set_xlabel("model after its turn at")
        axes.set_ylabel(f"{found['split']} images of")
        axes.set_title(f"round {number}", fontsize=10)
    figure.colorbar(axes.images[0], ax=figure.axes, label=found["metric"] + unit, shrink=0.8)
    figure.suptitle(f"Forgetting: {found['metric']}{unit} of each hand-over, {found['better']} is better", fontsize=11)
    figure.savefig(path, dpi=150)


def write(found: dict[str, Any], folder: Path) -> None:
    """`forgetting.json` and `forgetting.png` in the run folder."""
    atomic_write(folder / "forgetting.json", json.dumps(found, indent=2) + "\n")
    draw(found, folder / "forgetting.png")
