"""Draws docs/images/demo.png from what `make demo` has written: python docs/images/demo.py [runs/demo]"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from polyclinic import load_study
from polyclinic.data.parts import open_site, prepare

HERE = Path(__file__).parent
ACROSS = 5
#: methods of the demo from the top, if it has them: what the picture calls them, and the colour of their kind
ALONE, PLAIN, REPLAY, POOLED, INK = "#9aa5b1", "#d9822b", "#0f8b8d", "#4a5568", "#22303c"
SHOWN = {
    "standalone": ("each hospital alone", ALONE),
    "cwt": ("CWT: the model goes round", PLAIN),
    "fedavg": ("FedAvg: models are averaged", PLAIN),
    "cwt-replay": ("CWT with replayed images", REPLAY),
    "fedreplay": ("FedReplay: latents are sent once", REPLAY),
    "analytic": ("analytic: sums of a public network", REPLAY),
    "centralized": ("pooled images, from random weights", POOLED),
    "centralized-public": ("pooled images, from public weights", POOLED),
}


def main(folder: Path) -> None:
    figure = Figure(figsize=(10.5, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.5))
    draw_hospitals(left, folder)
    draw_errors(right, folder)
    figure.savefig(HERE / "demo.png", dpi=120)


def draw_hospitals(axes, folder: Path) -> None:
    """A row of images for each hospital, with the ages that it sees."""
    study = load_study(folder / "fedavg-seed0" / "study.toml")
    parts = prepare(study.data, study.sites)
    rows, names = [], []
    for name in parts.names:
        part = open_site(parts.folder, name).train
        chosen = np.linspace(0, len(part) - 1, ACROSS).astype(int)
        rows.append(np.concatenate([np.pad(part.images[one][0], 1, constant_values=255) for one in chosen], axis=1))
        low, high = np.quantile(part.labels, (0.1, 0.9)) / 12
        names.append(f"{name}\n{low:.0f} to {high:.0f} years")
    axes.imshow(np.concatenate(rows), cmap="gray", interpolation="antialiased", aspect="equal")
    step = len(rows[0])
    axes.set_yticks([(place + 0.5) * step for place in range(len(rows))], names, color=INK)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.set_title("Four hospitals see different ages", color=INK, fontsize=11)
    for spine in axes.spines.values():
        spine.set_visible(False)


def errors_of(folder: Path) -> dict[str, float]:
    """The error of each method of the comparison, and of the run beside it that pools images on public weights."""
    methods = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))["methods"]
    pooled = json.loads((folder / "centralized-public" / "result.json").read_text(encoding="utf-8"))
    return {name: figures["test_mae"]["mean"] for name, figures in methods.items()} | {
        "centralized-public": pooled["metrics"]["test"]["mae"]
    }


def draw_errors(axes, folder: Path) -> None:
    errors = errors_of(folder)
    shown = {name: look for name, look in SHOWN.items() if name in errors}
    for place, (name, (_, colour)) in enumerate(shown.items()):
        error = errors[name]
        axes.barh(place, error, color=colour, height=0.72)
        axes.text(error + 0.5, place, f"{error:.0f}", va="center", color=INK, fontsize=10)
    axes.set_yticks(range(len(shown)), [words for words, _ in shown.values()], color=INK)
    axes.invert_yaxis()
    axes.set_xlabel("error of the bone age in months (lower is better)", color=INK)
    axes.set_title("How wrong is the model?", color=INK, fontsize=11)
    axes.tick_params(length=0, colors=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
