"""Figures and tables from what `benchmarks/felicia.py --out DIR` wrote: `python benchmarks/felicia_figures.py DIR`.

digits.png (Fig. 5) and digits_coverage.png, bias.png and digit-bias.png (Fig. 6), skin.png (Figs. 8-10), contact
sheets, and tables in Markdown. Means and standard deviations are over seeds; of a seed, marks are means over the looks
in the second half of its training (the paper's moving average), unless validation images chose a look, as a table says.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure

from polyclinic.data.contact_sheet import contact_sheet
from polyclinic.metrics.distribution import precision_recall

Row = Mapping[str, Any]
COLOURS = {0.0: "tab:orange", 0.3: "tab:olive", 0.5: "tab:pink", 1.0: "tab:green", 2.0: "tab:cyan", 3.0: "tab:blue"}
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


def late(rows: Iterable[Row]) -> list[Row]:
    """Those of the looks in the second half of the training."""
    rows = list(rows)
    half = max(row["images"] for row in rows) / 2
    return [row for row in rows if row["images"] > half]


def gain(rows: Iterable[Row], base: Iterable[Row], metric: str) -> tuple[float, float]:
    """How much more than `base`, seed by seed: mean and standard deviation."""
    rows, base = list(rows), list(base)
    more = [
        {"seed": s, "more": mean_std(where(rows, seed=s), metric)[0] - mean_std(where(base, seed=s), metric)[0]}
        for s in values(rows, "seed")
    ]
    return mean_std(more, "more")


def text(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.3f} ± {pair[1]:.3f}"


# --- digits -------------------------------------------------------------------------------------------


def digits(found: dict[str, Any], arrays: Mapping[str, np.ndarray], out: Path) -> list[str]:
    rows = late(found["rows"])
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
    return [
        *digits_table(rows, alphas, weights),
        "",
        *chosen_table(found["rows"], alphas),
        "",
        *plane_table(arrays, alphas, weights),
    ]


def digits_table(rows: list[Row], alphas: list[float], weights: list[float]) -> list[str]:
    """Coverage of held-out fours by both owners' made ones, and of those of the cluster that an owner lacks."""
    others = [{**row, "lacking": row["coverage_2" if row["owner"] == OWNERS[0] else "coverage_1"]} for row in rows]
    lines = [
        "| α, % | " + " | ".join(f"{what}, {name_of(w)}" for what in ("all", "other's") for w in weights) + " |",
        "|---" * (2 * len(weights) + 1) + "|",
    ]
    for alpha in alphas:
        cells = [
            text(mean_std(where(others, alpha=alpha, **{"lambda": weight}), metric))
            for metric in ("coverage", "lacking")
            for weight in weights
        ]
        lines.append(f"| {alpha:g} | " + " | ".join(cells) + " |")
    return lines


def chosen_table(rows: list[Row], alphas: list[float]) -> list[str]:
    """Look (and lambda) of each seed chosen by how both owners' validation fours are covered, then test fours."""
    lines = ["| α, % | local GAN, look chosen | FELICIA, look and λ chosen | difference |", "|---|---|---|---|"]
    for alpha in alphas:
        here = where(rows, alpha=alpha)
        local = best_look(where(here, **{"lambda": 0.0}))
        ours = best_look([row for row in here if row["lambda"] > 0])
        cells = [mean_std(local, "coverage"), mean_std(ours, "coverage"), gain(ours, local, "coverage")]
        lines.append(f"| {alpha:g} | " + " | ".join(text(cell) for cell in cells) + " |")
    return lines


def best_look(rows: list[Row]) -> list[Row]:
    """Of each seed the rows of the look and lambda with the best mean over owners on validation images."""
    found: list[Row] = []
    for seed in values(rows, "seed"):
        own = where(rows, seed=seed)
        pairs = {(row["images"], row["lambda"]) for row in own}
        looks = [where(own, images=images, **{"lambda": weight}) for images, weight in sorted(pairs)]
        found += max(looks, key=lambda look: np.mean([row["validation"] for row in look]))
    return found


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
                cells += [f"{precision_recall(part, made)['coverage']:.2f}" for part in (real, others)]
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


def bias(found: dict[str, Any], arrays: Mapping[str, np.ndarray], out: Path, name: str = "bias") -> list[str]:
    rows, real = late(found["rows"]), found["real"]
    shares, weights = values(rows, "share"), values(rows, "lambda")
    groups = Groups(found["usual"], found["rare"])
    lines = {"real": ("black", {share: where(real, share=share) for share in shares})}
    for weight in weights:
        of_share = {s: where(rows, share=s, diet="augmented", **{"lambda": weight}) for s in shares}
        lines[f"real + {name_of(weight)}"] = (colour(weight), of_share)
    if len(shares) > 1:
        bias_by_share(lines, shares, groups, out / f"{name}.png")
    else:
        bias_along_training(where(found["rows"], diet="augmented"), real, weights, groups, out / f"{name}.png")
    pictures = {_label(key, groups.rare): torch.from_numpy(a)[:12] for key, a in arrays.items()}
    contact_sheet(pictures, out / f"{name}_sheet.png")
    by_name = {line: by_share for line, (_, by_share) in lines.items()}
    for weight in weights:
        made = {s: where(rows, share=s, diet="synthetic", **{"lambda": weight}) for s in shares}
        by_name[f"synthetic, {name_of(weight)}"] = made
    for weight in weights:
        by_name[f"released, {name_of(weight)}"] = {
            s: released(where(found["rows"], share=s, diet="augmented", **{"lambda": weight}), where(real, share=s))
            for s in shares
        }
    return [*bias_table(by_name, shares, groups), "", *gain_table(by_name, shares, groups)]


class Groups(NamedTuple):
    """The sub-groups of the class in which one is rare."""

    usual: str
    rare: str

    @property
    def metrics(self) -> dict[str, str]:
        """Accuracies that are drawn, and what of."""
        return {"mean": "all", self.usual: f"of {self.usual}", self.rare: f"of {self.rare}"}


def bias_by_share(lines: dict[str, tuple[str, dict]], shares: list[float], groups: Groups, path: Path) -> None:
    """Fig. 6: accuracy against the share of the sub-group that is usual."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    for axis, (metric, what) in zip(figure.subplots(1, 3), groups.metrics.items(), strict=True):
        for name, (paint, by_share) in lines.items():
            points = [mean_std(by_share[share], metric) for share in shares]
            y, error = zip(*points, strict=True)
            axis.errorbar([1 - s for s in shares], y, error, label=name, color=paint, marker="o", capsize=2)
        axis.set_xlabel(f"β, share of {groups.usual} in its class at the first owner")
        axis.set_ylabel(f"accuracy, {what}")
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def bias_along_training(rows: list[Row], real: list[Row], weights: list[float], groups: Groups, path: Path) -> None:
    """Where only one share was asked for: real + synthetic images along training."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    for axis, (metric, what) in zip(figure.subplots(1, 3), groups.metrics.items(), strict=True):
        along_training(axis, rows, real, weights, metric, with_band=True)
        axis.set_ylabel(f"accuracy, {what}")
    axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def bias_table(by_name: dict[str, dict[float, list[Row]]], shares: list[float], groups: Groups) -> list[str]:
    usual, rare = groups
    table = [f"| share of {rare} | trained on | all | {usual} | {rare} | AUC | {rare} among made |", "|---" * 7 + "|"]
    for share in shares:
        for name, by_share in by_name.items():
            metrics = ("mean", usual, rare, "auc", *(["rare_share"] if name.startswith("synthetic") else []))
            cells = [text(mean_std(by_share[share], metric)) for metric in metrics]
            cells += [""] * (5 - len(cells))
            table.append(f"| {share:g} | {name} | " + " | ".join(cells) + " |")
    return table


def gain_table(by_name: dict[str, dict[float, list[Row]]], shares: list[float], groups: Groups) -> list[str]:
    """What the rarer sub-group gains over real images alone, seed by seed: accuracy, AUC against the other class."""
    augmented = [name for name in by_name if name.startswith(("real + ", "released"))]
    table = [f"| share of {groups.rare} | rare | " + " | ".join(augmented) + " |", "|---" * (len(augmented) + 2) + "|"]
    for share in shares:
        rare = groups.rare if share <= 0.5 else groups.usual
        for metric, what in ((rare, rare), (f"auc of {rare}", f"{rare}, AUC")):
            if metric in by_name["real"][share][0]:
                cells = [text(gain(by_name[name][share], by_name["real"][share], metric)) for name in augmented]
                table.append(f"| {share:g} | {what} | " + " | ".join(cells) + " |")
    return table


# --- skin ---------------------------------------------------------------------------------------------


def skin(found: dict[str, Any], arrays: Mapping[str, np.ndarray], out: Path) -> list[str]:
    rows, real = found["rows"], found["real"]
    weights = values(rows, "lambda")
    shown = [weight for weight in (0.0, 3.0) if weight in weights]
    height = 3 if len(weights) > len(shown) else 2
    figure = Figure(figsize=(11, 3.4 * height), layout="constrained")
    axes = figure.subplots(height, 2, sharey=True)
    for column, diet in enumerate(("synthetic", "augmented")):
        of_diet = where(rows, diet=diet)
        along_training(axes[0, column], of_diet, real, shown, with_band=True)
        if height == 3:
            along_training(axes[1, column], of_diet, real, weights, with_band=False)
        by_lambda(axes[-1, column], of_diet, real, weights)
        made = "synthetic images" if diet == "synthetic" else "real + synthetic images"
        axes[0, column].set_title(f"trained on {made}")
    for row in axes:
        row[0].set_ylabel("AUC on 200 + 200 held-out images")
        row[1].legend(fontsize=7)
    figure.savefig(out / "skin.png", dpi=110)
    contact_sheet({_label(key): torch.from_numpy(a)[:16] for key, a in arrays.items()}, out / "skin_sheet.png")
    return skin_table(rows, real, weights)


def along_training(
    axis: Any, rows: list[Row], real: list[Row], weights: list[float], metric: str = "auc", *, with_band: bool
) -> None:
    """Figs. 8 and 9: AUC against the images seen, the mean of seeds and their standard deviation."""
    _real_line(axis, real, metric)
    moments = values(rows, "images")
    for weight in weights:
        points = [mean_std(where(rows, images=m, **{"lambda": weight}), metric) for m in moments]
        y, error = (np.array(part) for part in zip(*points, strict=True))
        axis.plot(moments, y, label=name_of(weight), color=colour(weight), marker="o", markersize=3)
        if with_band:
            axis.fill_between(moments, y - error, y + error, color=colour(weight), alpha=0.15)
    axis.xaxis.set_major_formatter(lambda images, _: f"{images / 1000:,.0f}")
    axis.set_xlabel("thousands of images seen by each owner")


def by_lambda(axis: Any, rows: list[Row], real: list[Row], weights: list[float]) -> None:
    """Fig. 10: every look of every seed, by lambda; lighter ones are earlier."""
    _real_line(axis, real)
    end = max(row["images"] for row in rows)
    for place, weight in enumerate(weights):
        own = where(rows, **{"lambda": weight})
        at = [place + 0.15 * (row["seed"] - 1) for row in own]
        shade = [min(1.0, 0.2 + 0.8 * row["images"] / end) for row in own]
        axis.scatter(at, [row["auc"] for row in own], color=colour(weight), alpha=shade, s=16, linewidths=0)
        axis.plot([place - 0.3, place + 0.3], [mean_std(late(own), "auc")[0]] * 2, color=colour(weight))
    axis.set_xticks(range(len(weights)), [f"{weight:g}" for weight in weights])
    axis.set_xlabel("λ (0: local GAN); lines: second half of the training")


def _real_line(axis: Any, real: list[Row], metric: str = "auc") -> None:
    base = mean_std(real, metric)
    axis.axhline(base[0], color="black", linestyle="--", label="real only")
    axis.axhspan(base[0] - base[1], base[0] + base[1], color="gray", alpha=0.2)


def skin_table(rows: list[Row], real: list[Row], weights: list[float]) -> list[str]:
    """AUC and melanomas found; what is more than the local GAN's, and than real images alone, seed by seed."""
    table = [
        "| | synthetic | more than local GAN's | real + synthetic | more than real only | released by the gate | "
        "melanomas found: synthetic | real + synthetic | released | melanomas among made malignant ones |",
        "|---" * 10 + "|",
        f"| real only | | | {text(mean_std(real, 'auc'))} | | | | {text(mean_std(real, 'MEL'))} | | |",
    ]
    local = late(where(rows, diet="synthetic", **{"lambda": 0.0}))
    for weight in weights:
        made, both = (where(rows, diet=diet, **{"lambda": weight}) for diet in ("synthetic", "augmented"))
        let_out = released(both, real)
        cells = [
            *(mean_std(late(made), "auc"), gain(late(made), local, "auc")),
            *(mean_std(late(both), "auc"), gain(late(both), real, "auc"), mean_std(let_out, "auc")),
            *(mean_std(late(made), "MEL"), mean_std(late(both), "MEL"), mean_std(let_out, "MEL")),
            mean_std(late(made), "rare_share"),
        ]
        table.append(f"| {name_of(weight)} | " + " | ".join(text(cell) for cell in cells) + " |")
    return table


def chosen_by_validation(rows: list[Row]) -> list[Row]:
    """Of each seed the moment with the best score on validation images."""
    return [max(where(rows, seed=seed), key=lambda row: row["validation"]) for seed in values(rows, "seed")]


def released(augmented: list[Row], real: list[Row]) -> list[Row]:
    """Of each seed what the gate lets the owner release: augmented, at the look that validation chose, where validation
    says that it helped, else real only."""
    pairs = [(row, where(real, seed=row["seed"])[0]) for row in chosen_by_validation(augmented)]
    return [row if row["validation"] > alone["validation"] else alone for row, alone in pairs]


def _label(key: str, rare: str = "") -> str:
    return key.replace("share=", f"{rare} ").replace("lambda=", "λ ").replace("|", "\n")


def main() -> None:
    out = Path(sys.argv[1])
    of_digits = functools.partial(bias, name="digit-bias")
    for name, draw in (("digits", digits), ("bias", bias), ("digit-bias", of_digits), ("skin", skin)):
        if (out / f"{name}.json").exists():
            found = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
            with np.load(out / f"{name}.npz") as arrays:
                table = draw(found, dict(arrays), out)
            print(f"\n{name}: {found['training']}\n")
            print("\n".join(table))


if __name__ == "__main__":
    main()
