"""Figures and tables from what `benchmarks/felicia.py --out DIR` wrote: `python benchmarks/felicia_figures.py DIR`.

digits.png (Fig. 5 and coverage), bias.png (Fig. 6), skin.png (Figs. 8-10), contact sheets, and tables in Markdown.
Means and standard deviations are over seeds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from polyclinic.generators.coverage import measure
from polyclinic.generators.sheet import contact_sheet

Row = Mapping[str, Any]
COLOURS = {0.0: "tab:orange", 0.5: "tab:olive", 1.0: "tab:green", 2.0: "tab:cyan", 3.0: "tab:blue"}
MORE = {5.0: "tab:purple", 7.0: "tab:brown", 10.0: "tab:red"}


def colour(weight: float) -> str:
    return (COLOURS | MORE).get(weight, "tab:gray")


def name_of(weight: float) -> str:
    return "local GAN" if weight == 0 else f"FELICIA, λ = {weight:g}"


def where(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def values(rows: Iterable[Row], key: str) -> list[Any]:
    return sorted({row[key] for row in rows})


def mean_std(rows: Iterable[Row], metric: str) -> tuple[float, float]:
    """Over seeds; where a seed has several rows (two owners), those are averaged first."""
    rows = list(rows)
    each = [np.mean([row[metric] for row in where(rows, seed=seed)]) for seed in values(rows, "seed")]
    return float(np.mean(each)), float(np.std(each, ddof=1)) if len(each) > 1 else 0.0


def last(rows: Iterable[Row]) -> list[Row]:
    rows = list(rows)
    return where(rows, images=max(row["images"] for row in rows))


def text(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.3f} ± {pair[1]:.3f}"


# --- digits -------------------------------------------------------------------------------------------


def digits(found: dict[str, Any], arrays: Mapping[str, np.ndarray], out: Path) -> list[str]:
    rows = last(found["rows"])
    alphas, weights = values(rows, "alpha"), values(rows, "lambda")
    chosen = 1.0 if 1.0 in weights else max(weights)
    clouds(arrays, alphas, chosen, out / "digits.png")
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axis, metric in zip(figure.subplots(1, 2), ("coverage", "recall"), strict=True):
        for weight in weights:
            line = [mean_std(where(rows, alpha=alpha, **{"lambda": weight}), metric) for alpha in alphas]
            y, error = zip(*line, strict=True)
            axis.errorbar(alphas, y, error, label=name_of(weight), color=colour(weight), marker="o", capsize=2)
        axis.set_xlabel("α, % of each cluster exchanged")
        axis.set_ylabel(f"{metric} of held-out fours")
    axis.legend(fontsize=7)
    figure.savefig(out / "digits_coverage.png", dpi=120)
    sheet = {
        f"α {alpha:g}, {owner}\n{'GAN' if weight == 0 else 'FELICIA'}": torch.from_numpy(
            arrays[f"made|{alpha}|{weight}|{owner}"]
        )
        for alpha in alphas
        for weight in (0.0, chosen)
        for owner in ("site-1", "site-2")
    }
    contact_sheet(sheet, out / "digits_sheet.png")
    lines = [
        "| α, % | " + " | ".join(f"coverage, {name_of(weight)}" for weight in weights) + " |",
        "|---" * (len(weights) + 1) + "|",
    ]
    for alpha in alphas:
        cells = [text(mean_std(where(rows, alpha=alpha, **{"lambda": weight}), "coverage")) for weight in weights]
        lines.append(f"| {alpha:g} | " + " | ".join(cells) + " |")
    return [*lines, "", *plane_table(arrays, alphas, weights)]


def plane_table(arrays: Mapping[str, np.ndarray], alphas: list[int], weights: list[float]) -> list[str]:
    """Coverage in the plane of Fig. 5, first seed: of all fours, and of those of the other owner's cluster."""
    real, cluster = torch.from_numpy(arrays["real"]), torch.from_numpy(arrays["cluster"])
    lines = [
        "| α, % | | " + " | ".join(f"{owner}, {what}" for owner in OWNERS for what in ("all", "other's")) + " |",
        "|---" * 6 + "|",
    ]
    for alpha in alphas:
        for weight in weights:
            cells = []
            for place, owner in enumerate(OWNERS):
                made = torch.from_numpy(arrays[f"{alpha}|{weight}|{owner}"])
                others = real[cluster == 1 - place]
                cells += [f"{measure(part, made)['coverage']:.2f}" for part in (real, others)]
            lines.append(f"| {alpha:g} | {name_of(weight)} | " + " | ".join(cells) + " |")
    return lines


OWNERS = ("site-1", "site-2")


def clouds(arrays: Mapping[str, np.ndarray], alphas: list[int], chosen: float, path: Path) -> None:
    """Fig. 5: real fours in the background by cluster, made ones in front."""
    columns = [(0.0, "site-1"), (0.0, "site-2"), (chosen, "site-1"), (chosen, "site-2")]
    figure = Figure(figsize=(9, 2.1 * len(alphas)), layout="constrained")
    axes = figure.subplots(len(alphas), 4, squeeze=False, sharex=True, sharey=True)
    real, cluster = arrays["real"], arrays["cluster"]
    for row, alpha in zip(axes, alphas, strict=True):
        for axis, (weight, owner) in zip(row, columns, strict=True):
            for one, paint in ((0, "tab:blue"), (1, "tab:red")):
                axis.scatter(*real[cluster == one].T, s=1, color=paint, alpha=0.25, linewidths=0)
            axis.scatter(*arrays[f"{alpha}|{weight}|{owner}"][:700].T, s=2, color="tab:green", linewidths=0)
            axis.set_xticks([])
            axis.set_yticks([])
        row[0].set_ylabel(f"α = {alpha:g} %")
    for axis, (weight, owner) in zip(axes[0], columns, strict=True):
        axis.set_title(f"{'GAN' if weight == 0 else 'FELICIA'}, {owner}", fontsize=9)
    figure.savefig(path, dpi=110)


# --- bias ---------------------------------------------------------------------------------------------


def bias(found: dict[str, Any], arrays: Mapping[str, np.ndarray], out: Path) -> list[str]:
    rows, real = last(found["rows"]), found["real"]
    shares = values(rows, "share")
    chosen = max(values(rows, "lambda"))
    lines = {
        "real": ("black", {share: where(real, share=share) for share in shares}),
        "real + GAN": (colour(0.0), {s: where(rows, share=s, diet="augmented", **{"lambda": 0.0}) for s in shares}),
        "real + FELICIA": (
            colour(chosen),
            {s: where(rows, share=s, diet="augmented", **{"lambda": chosen}) for s in shares},
        ),
    }
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    for axis, metric in zip(figure.subplots(1, 3), ("mean", "deer", "horse"), strict=True):
        for name, (paint, by_share) in lines.items():
            points = [mean_std(by_share[share], metric) for share in shares]
            y, error = zip(*points, strict=True)
            axis.errorbar([1 - s for s in shares], y, error, label=name, color=paint, marker="o", capsize=2)
        axis.set_xlabel("β, share of deer in class 2 at the first owner")
        axis.set_ylabel(f"accuracy, {'all' if metric == 'mean' else metric}")
    axis.legend(fontsize=8)
    figure.savefig(out / "bias.png", dpi=120)
    contact_sheet({_label(key): torch.from_numpy(a)[:12] for key, a in arrays.items()}, out / "bias_sheet.png")
    table = ["| share of horses | accuracy on | " + " | ".join(lines) + " |", "|---" * (len(lines) + 2) + "|"]
    for share in shares:
        for metric in ("mean", "deer", "horse"):
            cells = [text(mean_std(by_share[share], metric)) for _, by_share in lines.values()]
            table.append(f"| {share:g} | {'all' if metric == 'mean' else metric} | " + " | ".join(cells) + " |")
    return table


# --- skin ---------------------------------------------------------------------------------------------


def skin(found: dict[str, Any], arrays: Mapping[str, np.ndarray], out: Path) -> list[str]:
    rows, real = found["rows"], found["real"]
    weights, moments = values(rows, "lambda"), values(rows, "images")
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    base = mean_std(real, "auc")
    for axis, diet in zip(figure.subplots(1, 2, sharey=True), ("synthetic", "augmented"), strict=True):
        axis.axhline(base[0], color="black", linestyle="--", label="real only")
        axis.axhspan(base[0] - base[1], base[0] + base[1], color="gray", alpha=0.2)
        for weight in weights:
            points = [mean_std(where(rows, diet=diet, images=m, **{"lambda": weight}), "auc") for m in moments]
            y, error = (np.array(part) for part in zip(*points, strict=True))
            axis.plot(moments, y, label=name_of(weight), color=colour(weight), marker="o", markersize=3)
            axis.fill_between(moments, y - error, y + error, color=colour(weight), alpha=0.12)
        axis.set_xlabel("images seen by each owner's discriminator")
        axis.set_title("trained on synthetic images" if diet == "synthetic" else "trained on real + synthetic images")
    axis.figure.axes[0].set_ylabel("AUC on 200 + 200 held-out images")
    axis.legend(fontsize=7)
    figure.savefig(out / "skin.png", dpi=120)
    contact_sheet({_label(key): torch.from_numpy(a)[:16] for key, a in arrays.items()}, out / "skin_sheet.png")
    return skin_table(rows, real, weights)


def skin_table(rows: list[Row], real: list[Row], weights: list[float]) -> list[str]:
    """AUC at the end, at the moment that validation chose, and what the gate releases."""
    table = [
        "| | synthetic, at the end | synthetic, chosen on validation | real + synthetic, at the end | "
        "chosen on validation | released by the gate | melanoma, released |",
        "|---|---|---|---|---|---|---|",
        f"| real only | | | {text(mean_std(real, 'auc'))} | | | {text(mean_std(real, 'MEL'))} |",
    ]
    for weight in weights:
        own = where(rows, **{"lambda": weight})
        cells = []
        for diet in ("synthetic", "augmented"):
            of_diet = where(own, diet=diet)
            cells += [text(mean_std(last(of_diet), "auc")), text(mean_std(chosen_by_validation(of_diet), "auc"))]
        released = gate(chosen_by_validation(where(own, diet="augmented")), real)
        cells += [text(mean_std(released, "auc")), text(mean_std(released, "MEL"))]
        table.append(f"| {name_of(weight)} | " + " | ".join(cells) + " |")
    return table


def chosen_by_validation(rows: list[Row]) -> list[Row]:
    """Of each seed the moment with the best score on validation images."""
    return [max(where(rows, seed=seed), key=lambda row: row["validation"]) for seed in values(rows, "seed")]


def gate(augmented: list[Row], real: list[Row]) -> list[Row]:
    """Of each seed what the owner would release: augmented where validation says it helped, else real only."""
    pairs = [(row, where(real, seed=row["seed"])[0]) for row in augmented]
    return [row if row["validation"] > alone["validation"] else alone for row, alone in pairs]


def _label(key: str) -> str:
    return key.replace("share=", "horses ").replace("lambda=", "λ ").replace("|", "\n")


def main() -> None:
    out = Path(sys.argv[1])
    for name, draw in (("digits", digits), ("bias", bias), ("skin", skin)):
        if (out / f"{name}.json").exists():
            found = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
            with np.load(out / f"{name}.npz") as arrays:
                table = draw(found, dict(arrays), out)
            print(f"\n{name}: {found['training']}\n")
            print("\n".join(table))


if __name__ == "__main__":
    main()
