"""Epsilon against error: private heads on a public encoder beside other mechanisms, in one picture.

    polyclinic compare examples/bone_age_private_head.toml --methods private-head --seeds 3 --out runs/shared-3
    python benchmarks/frontier.py --keep "shared noise" runs/shared-3 ...    takes epsilon and error out of runs
    python benchmarks/frontier.py              draws docs/images/frontier.png from what is kept

Kept figures lie in benchmarks/figures/frontier: a row for each comparison, with its command, date and machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / "figures" / "frontier"
PICTURE = ROOT / "docs" / "images" / "frontier.png"
#: measured before, on one H200: docs/results.md. Mechanism, epsilon, months, deviation, what is covered
OTHERS = [("CWT+Replay, private generator (covers that only; other delta)", 27.1, 26.3, 2.8)]
#: the same table: without any privacy
WITHOUT = {"FedAvg from random weights, no privacy": 32.3, "analytic, no privacy (sums leave)": 15.8}
COLOURS = ["#1f6f8b", "#c8553d", "#5b8e7d", "#7a5195"]

Row = dict[str, Any]


def row_of(mechanism: str, folder: Path, metric: str) -> Row:
    """One comparison's runs: their epsilon, and mean and deviation of the error."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*/result.json"))]
    epsilons = {round(one["privacy"]["epsilon"], 2) for one in results}
    if len(epsilons) != 1:
        raise SystemExit(f"{folder}: runs of one comparison must have one epsilon, and these have {sorted(epsilons)}")
    errors = [one["metrics"]["test"][metric] for one in results]
    deviation = statistics.stdev(errors) if len(errors) > 1 else 0.0
    figures = {"epsilon": epsilons.pop(), "mean": round(statistics.fmean(errors), 2), "std": round(deviation, 2)}
    return {"mechanism": mechanism, **figures, "n": len(errors), "metric": metric}


def keep(pairs: list[list[str]], metric: str, machine: str, name: str) -> None:
    rows = [row_of(mechanism, Path(folder), metric) for mechanism, folder in pairs]
    content = {"machine": machine, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "rows": rows}
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def draw(rows: list[Row], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    figure, axes = plt.subplots(figsize=(7.5, 5.2), layout="constrained")
    for colour, mechanism in zip(COLOURS, dict.fromkeys(row["mechanism"] for row in rows), strict=False):
        mine = sorted((row["epsilon"], row["mean"], row["std"]) for row in rows if row["mechanism"] == mechanism)
        x, y, spread = zip(*mine, strict=True)
        axes.errorbar(x, y, spread, marker="o", capsize=3, color=colour, label=f"private-head, {mechanism}")
    for mechanism, epsilon, mean, spread in OTHERS:
        axes.errorbar([epsilon], [mean], [spread], marker="s", capsize=3, color="#777777", label=mechanism)
    for style, (words, mean) in zip(("--", ":"), WITHOUT.items(), strict=True):
        axes.axhline(mean, color="#999999", linestyle=style, linewidth=1.2, label=words)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([1, 3, 8, 27]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set(
        xlabel="epsilon (left is more private); delta 1e-5 unless said", ylabel="bone age, mean absolute error, months"
    )
    axes.set_title("What privacy costs: four hospitals that hardly share an age", fontsize=11)
    axes.grid(color="#e6eaee", linewidth=0.6)
    figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=2)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", nargs=2, action="append", metavar=("MECHANISM", "FOLDER"), default=[])
    parser.add_argument("--name", default="bone_age", help="what is kept is called so; the picture shows bone_age")
    parser.add_argument("--metric", default="mae")
    parser.add_argument("--machine", default="unknown", help="in words")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--quick", action="store_true", help="print what is kept, and draw nothing")
    options = parser.parse_args()
    if options.keep:
        keep(options.keep, options.metric, options.machine, options.name)
    file = KEPT / "bone_age.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    if rows and not options.quick:
        draw(rows, PICTURE)
    figures = json.dumps({"benchmark": "frontier", "rows": rows})
    if options.json:
        options.json.write_text(figures + "\n", encoding="utf-8")
    print(figures)


if __name__ == "__main__":
    main()
