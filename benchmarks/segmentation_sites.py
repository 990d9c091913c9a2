"""Segmentation on natural sites (Qu et al. 2022, Fig. 6): Dice by method, by site and by the number of sites.

Every model is scored on the test images of all sites, also of those that did not train it. The learning rate is chosen
on validation images, once for all methods. Runs that are finished are not run again: a benchmark that was stopped goes
on.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from polyclinic import Study, compare, load_study
from polyclinic.data.parts import open_site, prepare
from polyclinic.errors import WorkFailed
from polyclinic.files import read_tensors
from polyclinic.runner.assembly import Assembly
from polyclinic.training.loop import Trainer

STUDY = Path(__file__).parent.parent / "examples" / "brain_masks_sites.toml"
METHODS = ("centralized", "cwt", "fedavg", "fedavg-share", "fedreplay")
#: with which the learning rate is chosen
SEARCH = ("centralized", "fedavg")
QUICK = {
    "data": {"source": "brain-phantom", "samples": 90, "size": 28, "test": 0.25},
    "sites": {"partition": "iid", "count": 3},
    "model.backbone": "unet",
    "method.rounds": 1,
    "generator.epochs": 1,
    "generator.width": 8,
    "engine.device": "cpu",
}

FIGURE = "segmentation_sites.png"

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", type=Path, default=STUDY)
    parser.add_argument("--out", type=Path, default=Path("runs/masks"), help="folder of all runs, rows and the figure")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--replay", nargs="*", default=[], help="methods with a generator, with all sites only")
    parser.add_argument(
        "--numbers", nargs="*", type=int, default=[1, 2, 3, 4], help="sites that take part, largest first"
    )
    parser.add_argument("--lrs", nargs="+", default=["0.0001", "0.001"], help="learning rates to choose from")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--quick", action="store_true", help="drawn images, one round: does it run?")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    study = load_study(options.study)
    if options.quick:
        study, options.seeds, options.numbers = study.with_settings(QUICK), 1, options.numbers[:2]
    figures = measure(study, options)
    print_tables(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))


def measure(study: Study, options: argparse.Namespace) -> dict[str, Any]:
    """All rows: the methods with all sites first, then with fewer."""
    parts = prepare(study.data, study.sites)
    counts = {site: parts.info["counts"][site] for site in parts.names}
    by_size = sorted(parts.names, key=lambda site: (-counts[site]["train"], site))
    lr, scores = choose_lr(study, options)
    study = study.with_settings({"optimizer.lr": lr})
    scorer = Scorer(study, options.out)
    figures = {"benchmark": "segmentation_sites", "quick": options.quick, "lr": lr, "validation": scores}
    figures |= {"sites": by_size, "counts": counts, "rows": []}
    number = len(by_size)
    fewer = [(k, options.methods if k > 1 else ["centralized"]) for k in options.numbers if k < number]
    for k, methods in [(number, options.methods), *fewer, (number, options.replay)]:
        if methods:
            run_all(study, methods, options.out / f"sites-{k}", options, by_size[:k] if k < number else None)
            figures["rows"] += [row for method in methods for row in scorer.rows(method, k, options.seeds)]
            (options.out / "rows.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
            if chosen(figures, sites=number):
                draw(figures, options.out / FIGURE)
    return figures


def choose_lr(study: Study, options: argparse.Namespace) -> tuple[float, dict[str, float]]:
    """The learning rate with the best Dice on validation images, mean over the methods of the search, seed 0."""
    if len(options.lrs) == 1:
        return float(options.lrs[0]), {}
    jobs = max(1, options.jobs // len(options.lrs))

    def score(lr: str) -> float:
        out = options.out / f"lr-{lr}"
        compare(study, SEARCH, out, sets=[f"optimizer.lr={lr}"], jobs=jobs)
        return statistics.fmean(best_validation(out / f"{method}-seed{study.seed}") for method in SEARCH)

    with ThreadPoolExecutor(len(options.lrs) if options.jobs > 1 else 1) as pool:  # each run is a process
        scores = dict(zip(options.lrs, pool.map(score, options.lrs), strict=True))
    return float(max(scores, key=lambda lr: scores[lr])), scores


def best_validation(folder: Path) -> float:
    """The best Dice of a run on its validation images."""
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    return max(line["validation"]["pooled"]["dice"] for line in lines if line["validation"])


def run_all(
    study: Study, methods: Sequence[str], out: Path, options: argparse.Namespace, names: Sequence[str] | None
) -> None:
    """Run methods with some of the sites; what fails is said, and missing in the tables."""
    some: dict[str, Any] = {}
    if names is not None:
        some = {"sites.names": list(names)} if study.sites.partition == "column" else {"sites.count": len(names)}
    try:
        compare(study.with_settings(some), methods, out, seeds=options.seeds, jobs=options.jobs)
    except WorkFailed as error:
        print(f"{out}: {error}", flush=True)


class Scorer:
    """Scores released models on the test images of every site of the whole study."""

    def __init__(self, study: Study, out: Path) -> None:
        self.study, self.out = study, out
        self.parts = prepare(study.data, study.sites)
        self.trainer: Trainer = Assembly(study, self.parts, out.resolve()).trainer()

    def rows(self, method: str, number: int, seeds: int) -> list[Row]:
        """One row for each finished run: Dice of each site with test images, their mean, and of all patients."""
        found = []
        for seed in range(self.study.seed, self.study.seed + seeds):
            folder = self.out / f"sites-{number}" / f"{method}-seed{seed}"
            if (folder / "result.json").exists():
                result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
                megabytes = round(result["communication"]["total_bytes"] / 1e6, 1)
                found.append({"method": method, "sites": number, "seed": seed, **self.dice(folder), "MB": megabytes})
        return found

    def dice(self, folder: Path) -> Row:
        self.trainer.load(read_tensors(folder / "model.safetensors"))
        parts = {site: open_site(self.parts.folder, site).test for site in self.parts.names}
        sums = {site: self.trainer.evaluate(part) for site, part in parts.items() if len(part)}
        task = self.study.task
        by_site = {site: round(task.finish(found)["dice"], 4) for site, found in sums.items()}
        pooled = sum(float(found["dice"]) for found in sums.values()) / sum(int(f["cases"]) for f in sums.values())
        return {"dice": by_site, "mean": round(statistics.fmean(by_site.values()), 4), "patients": round(pooled, 4)}


# --- tables and figure --------------------------------------------------------------------------------


def chosen(figures: dict[str, Any], **wanted: Any) -> list[Row]:
    return [row for row in figures["rows"] if all(row[key] == value for key, value in wanted.items())]


def spread(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def print_tables(figures: dict[str, Any]) -> None:
    """Dice by site with all sites, and the mean over sites by the number of sites that trained."""
    number = len(figures["sites"])
    tested = list(figures["rows"][0]["dice"])
    methods = list(dict.fromkeys(row["method"] for row in chosen(figures, sites=number)))
    print(f"\n| method | mean over sites | {' | '.join(tested)} | MB |")
    print("|---" * (len(tested) + 3) + "|")
    for method in methods:
        rows = chosen(figures, sites=number, method=method)
        cells = ["{:.3f} ± {:.3f}".format(*spread([row["mean"] for row in rows]))]
        cells += [f"{statistics.fmean(row['dice'][site] for row in rows):.3f}" for site in tested]
        print(f"| {method} | {' | '.join(cells)} | {statistics.fmean(row['MB'] for row in rows):,.0f} |")
    numbers = sorted({row["sites"] for row in figures["rows"]})
    print(f"\n| sites that train | {' | '.join(map(str, numbers))} |")
    print("|---" * (len(numbers) + 1) + "|")
    for method in methods:
        cells = []
        for k in numbers:
            rows = chosen(figures, sites=k, method=method)
            cells.append("{:.3f} ± {:.3f}".format(*spread([row["mean"] for row in rows])) if rows else "")
        print(f"| {method} | {' | '.join(cells)} |")


def draw(figures: dict[str, Any], file: Path) -> None:
    """Bars of the methods with a mark for each site, and the mean Dice against the number of sites."""
    number = len(figures["sites"])
    methods = list(dict.fromkeys(row["method"] for row in chosen(figures, sites=number)))
    tested = list(figures["rows"][0]["dice"])
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    bars, curves = figure.subplots(1, 2)
    for place, method in enumerate(methods):
        rows, colour = chosen(figures, sites=number, method=method), f"C{place}"
        mean, std = spread([row["mean"] for row in rows])
        bars.bar(place, mean, yerr=std, color=colour, alpha=0.6, capsize=4)
        for site, marker in zip(tested, "osv^Dx", strict=False):
            value = statistics.fmean(row["dice"][site] for row in rows)
            bars.plot(place, value, marker, color="black", markersize=5, label=site.split()[0] if place == 0 else None)
        points = [(k, *spread(values)) for k in range(1, number + 1) if (values := _means(figures, method, k))]
        if len(points) > 1:
            curves.errorbar(*zip(*points, strict=True), color=colour, marker="o", capsize=3, label=method)
    bars.set_xticks(range(len(methods)), methods, rotation=20)
    bars.set(ylabel="Dice", ylim=(0, 1), title=f"{number} sites: mean over sites, and each site")
    bars.legend(fontsize=8, ncols=2, loc="lower right")
    curves.set(xlabel="sites that train, largest first", ylabel="Dice, mean over all sites", title="number of sites")
    curves.set_xticks(range(1, number + 1))
    if curves.get_legend_handles_labels()[0]:  # at first only one number of sites is measured
        curves.legend(fontsize=8)
    curves.grid(alpha=0.3)
    figure.savefig(file, dpi=120)


def _means(figures: dict[str, Any], method: str, number: int) -> list[float]:
    """One site alone is the same for every method."""
    method = "centralized" if number == 1 else method
    return [row["mean"] for row in chosen(figures, sites=number, method=method)]


if __name__ == "__main__":
    main()
