"""Epsilon against error: every private mechanism that was measured, in one picture, for bone age and pneumonia.

    polyclinic compare examples/bone_age_private_head.toml --methods private-head --seeds 3 --out runs/shared-3
    python lab/benchmarks/frontier.py --keep "private-head, shared noise" runs/shared-3 ...    takes figures out of runs
    python lab/benchmarks/frontier.py              draws lab/pages/frontier.png from what is kept

Kept figures lie in lab/figures/frontier: a file for each set of images, a row for each comparison, with date and
machine. `--keep` and `--without` add rows, or take the place of those with the same name and epsilon.
"""

import argparse
import json
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

LAB = Path(__file__).parents[1]
KEPT = LAB / "figures" / "frontier"
PICTURE = LAB / "pages" / "frontier.png"
#: the panels: what is kept under the name, its title, and the words at the axis of errors
PANELS = {
    "bone_age": ("bone age: four hospitals that hardly share an age", "mean absolute error, months (lower is better)"),
    "pneumonia": ("pneumonia: four hospitals with very different shares", "AUC (higher is better)"),
}
MARKERS = "osD^vP*"

Row = dict[str, Any]


def row_of(mechanism: str, folder: Path, metric: str) -> Row:
    """One comparison's runs: their epsilon, and mean and deviation of the error."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*/result.json"))]
    epsilons = {round(one["privacy"]["epsilon"], 2) for one in results}
    if len(epsilons) != 1:
        raise SystemExit(f"{folder}: runs of one comparison must have one epsilon, and these have {sorted(epsilons)}")
    errors = [one["metrics"]["test"][metric] for one in results]
    deviation = statistics.stdev(errors) if len(errors) > 1 else 0.0
    figures = {"epsilon": epsilons.pop(), "mean": round(statistics.fmean(errors), 3), "std": round(deviation, 3)}
    return {"mechanism": mechanism, **figures, "n": len(errors), "metric": metric}


def without_privacy(words: str, folder: Path, metric: str) -> Row:
    """The mean of runs that have no epsilon."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*/result.json"))]
    errors = [one["metrics"]["test"][metric] for one in results]
    return {"words": words, "mean": round(statistics.fmean(errors), 3), "n": len(errors)}


def load(name: str) -> dict[str, Any]:
    file = KEPT / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"rows": [], "without": []}


def keep(options: argparse.Namespace) -> None:
    kept, told = load(options.name), {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "machine": options.machine}
    for mechanism, folder in options.keep:
        row = row_of(mechanism, Path(folder), options.metric)
        old = [one for one in kept["rows"] if (one["mechanism"], one["epsilon"]) != (mechanism, row["epsilon"])]
        kept["rows"] = [*old, {**row, **told}]
    for words, folder in options.without:
        old = [one for one in kept["without"] if one["words"] != words]
        kept["without"] = [*old, {**without_privacy(words, Path(folder), options.metric), **told}]
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / f"{options.name}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def draw(names: list[str], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(len(names), figsize=(9.0, 5.4 * len(names)), layout="constrained", squeeze=False)
    for axes, name in zip(panels[:, 0], names, strict=True):
        draw_panel(axes, name)
    figure.suptitle("What privacy costs", fontsize=12)
    figure.savefig(file, dpi=150)


def draw_panel(axes: Any, name: str) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    kept, (title, words) = load(name), PANELS[name]
    mechanisms = list(dict.fromkeys(row["mechanism"] for row in kept["rows"]))
    for place, mechanism in enumerate(mechanisms):
        # a row whose deviation was not noted has no bar
        mine = sorted((r["epsilon"], r["mean"], r["std"] or 0.0) for r in kept["rows"] if r["mechanism"] == mechanism)
        x, y, spread = zip(*mine, strict=True)
        look = {"color": f"C{place}", "marker": MARKERS[place % len(MARKERS)], "markersize": 5}
        axes.errorbar(x, y, spread, capsize=3, label=mechanism, **look)
    for place, line in enumerate(kept["without"]):
        style = ("--", ":", "-.", (0, (1, 4)))[place % 4]
        axes.axhline(line["mean"], color="0.6", linestyle=style, linewidth=1.2, label=line["words"])
    axes.set_xscale("log")
    ticks = [1, 3, 8, 27] if max(row["epsilon"] for row in kept["rows"]) > 10 else [1, 3, 8]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set(xlabel="epsilon (left is more private); delta 1e-5 unless said", ylabel=words)
    axes.set_title(title, fontsize=11)
    axes.grid(color="0.9", linewidth=0.6)
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", nargs=2, action="append", metavar=("MECHANISM", "FOLDER"), default=[])
    parser.add_argument("--without", nargs=2, action="append", metavar=("WORDS", "FOLDER"), default=[])
    parser.add_argument("--name", default="bone_age", choices=list(PANELS), help="the set of images")
    parser.add_argument("--metric", default="mae")
    parser.add_argument("--machine", default="unknown", help="in words")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--quick", action="store_true", help="print what is kept, and draw nothing")
    options = parser.parse_args()
    if options.keep or options.without:
        keep(options)
    rows = {name: load(name)["rows"] for name in PANELS}
    drawn = [name for name in PANELS if rows[name]]
    if drawn and not options.quick:
        draw(drawn, PICTURE)
    figures = json.dumps({"benchmark": "frontier", "rows": rows})
    if options.json:
        options.json.write_text(figures + "\n", encoding="utf-8")
    print(figures)


if __name__ == "__main__":
    main()
