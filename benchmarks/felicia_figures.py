"""Tables and figures of `benchmarks/felicia.py`: `python benchmarks/felicia_figures.py DIR` draws them again.

Means and standard deviations are over seeds; differences are taken seed by seed. Nothing is chosen by test images.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Row = Mapping[str, Any]
COLOURS = {0.0: "tab:orange", 1.0: "tab:green", 3.0: "tab:blue", 7.0: "tab:brown"}
#: of the class with the rare sub-group: the usual one and the rare one
SUBGROUPS = {"digit-bias": ("4", "9"), "bias": ("deer", "horse"), "skin": ("BCC", "MEL")}


def draw(rows: list[Row], out: Path) -> None:
    """Print the tables of all experiments in `rows`, and draw their figures."""
    for name in dict.fromkeys(row["experiment"] for row in rows):
        own = where(rows, experiment=name)
        if name == "clusters":
            print(f"\nclusters: {len(values(own, 'seed'))} seeds\n")
            print("\n".join(cluster_table(own)), flush=True)
            continue
        table = coverage_table if name == "digits" else utility_table
        print(f"\n{name}: {len(values(own, 'seed'))} seeds, {own[0]['images']:,} images of each site\n")
        print("\n".join(table(own)), flush=True)
        (coverage_figure if name == "digits" else curve_figure)(own, out)


def name_of(weight: float) -> str:
    return "local GAN" if weight == 0 else f"FELICIA, lambda {weight:g}"


def where(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def values(rows: Iterable[Row], key: str) -> list[Any]:
    return sorted({row[key] for row in rows})


def by_seed(rows: Iterable[Row], metric: str) -> dict[int, float]:
    """Where a seed has several rows (two sites), those are averaged first."""
    rows = list(rows)
    return {seed: float(np.mean([row[metric] for row in where(rows, seed=seed)])) for seed in values(rows, "seed")}


def text(of_seeds: Mapping[int, float]) -> str:
    each = list(of_seeds.values())
    return f"{np.mean(each):.3f} ± {np.std(each, ddof=1) if len(each) > 1 else 0.0:.3f}"


def gain(rows: Iterable[Row], base: Iterable[Row], metric: str) -> dict[int, float]:
    """How much more than `base`, seed by seed."""
    more, less = by_seed(rows, metric), by_seed(base, metric)
    return {seed: more[seed] - less[seed] for seed in more}


def table_of(head: list[str], lines: Iterable[list[str]]) -> list[str]:
    rows = [f"| {' | '.join(cells)} |" for cells in lines]
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows]


# --- clusters -----------------------------------------------------------------------------------------


def cluster_table(rows: list[Row]) -> list[str]:
    """Whether a CNN learns as well from either cluster as from all images (Sec. 5.1)."""
    lines = [
        [name, text(by_seed(where(rows, **{"trained on": name}), "accuracy"))] for name in values(rows, "trained on")
    ]
    return table_of(["trained on", "accuracy of held-out digits"], lines)


# --- digits -------------------------------------------------------------------------------------------


def coverage_table(rows: list[Row]) -> list[str]:
    """Coverage of held-out fours of both sites, the mean of both generators, and of the cluster that a site lacks."""
    other = "coverage of the other cluster"
    weights, lines = values(rows, "lambda"), []
    for alpha in values(rows, "alpha"):
        of = {weight: where(rows, alpha=alpha, **{"lambda": weight}) for weight in weights}
        cells = [text(by_seed(of[weight], "coverage")) for weight in weights]
        cells += [text(gain(of[weights[-1]], of[weights[0]], "coverage"))]
        lines.append([f"{alpha:g} %", *cells, *(text(by_seed(of[weight], other)) for weight in weights)])
    names = [name_of(weight) for weight in weights]
    return table_of(["alpha", *(f"all: {n}" for n in names), "more", *(f"lacking cluster: {n}" for n in names)], lines)


def coverage_figure(rows: list[Row], out: Path) -> None:
    """Fig. 5: synthetic fours of the first seed over real ones; and coverage against alpha."""
    alphas, weights = values(rows, "alpha"), values(rows, "lambda")
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axis, metric in zip(figure.subplots(1, 2), ("coverage", "recall"), strict=True):
        for weight in weights:
            lines = [list(by_seed(where(rows, alpha=a, **{"lambda": weight}), metric).values()) for a in alphas]
            error = [np.std(one, ddof=1) if len(one) > 1 else 0.0 for one in lines]
            style: dict[str, Any] = {"label": name_of(weight), "color": COLOURS.get(weight), "marker": "o"}
            axis.errorbar(alphas, [np.mean(one) for one in lines], error, capsize=2, **style)
        axis.set_xlabel("alpha, % of each cluster exchanged")
        axis.set_ylabel(f"{metric} of held-out fours")
    axis.legend(fontsize=7)
    figure.savefig(out / "felicia_coverage.png", dpi=120)
    _planes(rows, alphas, weights, out)


def _planes(rows: list[Row], alphas: list[float], weights: list[float], out: Path) -> None:
    columns = [(weight, site) for weight in weights for site in ("site-1", "site-2")]
    figure = Figure(figsize=(2.2 * len(columns), 2.1 * len(alphas)), layout="constrained")
    axes = figure.subplots(len(alphas), len(columns), squeeze=False, sharex=True, sharey=True)
    seed = values(rows, "seed")[0]
    for line, alpha in zip(axes, alphas, strict=True):
        for axis, (weight, site) in zip(line, columns, strict=True):
            folder = out / "digits" / f"seed{seed:g}-alpha{alpha:g}-lambda{weight:g}"
            with np.load(folder / "real-plane.npz", allow_pickle=False) as real:
                for cluster, colour in ((0, "tab:blue"), (1, "tab:red")):
                    axis.scatter(*real["points"][real["cluster"] == cluster].T, s=1, color=colour, alpha=0.25)
            axis.scatter(
                *np.load(folder / f"{site}-plane.npy", allow_pickle=False)[:700].T, s=2, color="tab:green", linewidths=0
            )
            axis.set_xticks([])
            axis.set_yticks([])
            if alpha == alphas[0]:
                axis.set_title(f"{name_of(weight)}, {site}", fontsize=8)
        line[0].set_ylabel(f"alpha {alpha:g} %")
    figure.savefig(out / "felicia_digits.png", dpi=110)


# --- utility ------------------------------------------------------------------------------------------


def utility_table(rows: list[Row]) -> list[str]:
    """Networks of the first site by training set, on the test images of all sites."""
    usual, rare = SUBGROUPS[rows[0]["experiment"]]
    weights = values(rows, "lambda")
    real = where(rows, **{"trained on": "real", "lambda": weights[0]})
    found: dict[str, list[Row]] = {"real": real}
    for weight in weights:
        own = where(rows, **{"lambda": weight})
        found[f"real + {name_of(weight)}"] = where(own, **{"trained on": "augmented"})
        found[f"{name_of(weight)}'s alone"] = where(own, **{"trained on": "synthetic"})
        of_all = {"real + all sites' images": "augmented-all", "all sites' images alone": "synthetic-all"}
        for label, kind in of_all.items():
            if shared := where(own, **{"trained on": kind}):
                found[f"{label}, {name_of(weight)}"] = shared
        found[f"released, {name_of(weight)}"] = where(own, released=True)
    metrics = ("accuracy", f"accuracy of {usual}", f"accuracy of {rare}")
    lines = []
    for name, own in found.items():
        cells = [text(by_seed(own, metric)) for metric in metrics]
        more = [] if name == "real" else [text(gain(own, real, metrics[2])), text(gain(own, real, "auc"))]
        lines.append([name, *cells, text(by_seed(own, "auc")), *(more or ["", ""])])
    head = ["trained on", "accuracy", f"of {usual}", f"of {rare}", "AUC", f"{rare}: more than real", "AUC: more"]
    return table_of(head, lines)


def curve_figure(rows: list[Row], out: Path) -> None:
    """AUC on the first site's own test images along training, the mean of seeds; nothing to draw after one round."""
    if all(len(row["curve"]) < 2 for row in rows):
        return
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axis, name in zip(figure.subplots(1, 2, sharey=True), ("synthetic", "augmented"), strict=True):
        for weight in values(rows, "lambda"):
            own = where(rows, **{"trained on": name, "lambda": weight})
            rounds = sorted(own[0]["curve"], key=int)
            line = [np.mean([row["curve"][at] for row in own if row["curve"].get(at) is not None]) for at in rounds]
            axis.plot([int(at) for at in rounds], line, label=name_of(weight), color=COLOURS.get(weight), marker="o")
        axis.set_title(f"trained on {'real + synthetic' if name == 'augmented' else name} images", fontsize=9)
        axis.set_xlabel("round")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylabel("AUC on the site's own test images")
    axis.legend(fontsize=7)
    figure.savefig(out / f"felicia_{rows[0]['experiment'].replace('-', '_')}.png", dpi=120)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    draw(json.loads((folder / "rows.json").read_text(encoding="utf-8")), folder)
