"""The figures of FedER's benchmark: accuracies over seeds, the table that is printed, and Fig. 2."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from polyclinic.runner.compare import Entry


def figures(entries: list[Entry]) -> dict[str, Any]:
    """Of the runs of one row with several seeds: accuracies in percent, mean and standard deviation over seeds."""
    results = [entry.result for entry in entries if entry.result is not None]
    if not results:
        return {"n": 0}
    found: dict[str, Any] = {"n": len(results)}
    found["site performance"] = mean_and_deviation([100 * one["metrics"]["mean"]["accuracy"] for one in results])
    found["on all sites' images"] = mean_and_deviation([100 * one["metrics"]["test"]["accuracy"] for one in results])
    sites = list(results[0]["metrics"]["per_site"])
    found["sites"] = {
        site: mean_and_deviation([100 * one["metrics"]["per_site"][site]["accuracy"] for one in results])
        for site in sites
    }
    if "convergence" in results[0]["metrics"]:
        found["convergence by site"] = {site: converged(results, site) for site in sites}
        stds = [of_site["std"] for of_site in found["convergence by site"].values()]
        found["convergence std"] = statistics.fmean(stds)
    if "ensemble" in results[0]["metrics"]:
        found["ensemble"] = mean_and_deviation(
            [100 * one["metrics"]["ensemble"]["test"]["accuracy"] for one in results]
        )
    found["AUC"] = areas(results)
    found["bytes a site sends in a round"] = sent_per_round(results[0])
    return found


def areas(results: list[dict]) -> dict[str, Any]:
    """Areas under ROC curves in percent, which do not mind a threshold that another site has shifted."""
    found: dict[str, Any] = {
        "site performance": mean_and_deviation([100 * one["metrics"]["mean"]["auc"] for one in results])
    }
    of_runs = [areas_of_sites(one["metrics"].get("convergence", {})) for one in results]
    if all(of_runs):
        found["each model at each site"] = mean_and_deviation(
            [100 * statistics.fmean(s["mean"] for s in run) for run in of_runs]
        )
        found["convergence std"] = 100 * statistics.fmean(s["std"] for run in of_runs for s in run)
    return found


def areas_of_sites(convergence: dict[str, dict]) -> list[dict[str, float]]:
    """Mean and standard deviation over the sites' models; a site with images of one class only has no such area."""
    return [site["auc"] for site in convergence.values() if "auc" in site]


def converged(results: list[dict], site: str) -> dict[str, float]:
    """Table 3: mean and standard deviation over the sites' models on one site's images, averaged over seeds."""
    of_site = [one["metrics"]["convergence"][site]["accuracy"] for one in results]
    return {name: 100 * statistics.fmean(one[name] for one in of_site) for name in ("mean", "std")}


def mean_and_deviation(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0}


def sent_per_round(result: dict[str, Any]) -> float:
    """Models and buffers that a site sends in a round, in bytes; what is sent once, before, is spread over them."""
    kinds = ("weights", "synthetic-images", "real-images", "gradients")
    sites = result["data"]["counts"]
    if "handed_over_per_round" in result:
        return statistics.fmean(sum(of_site.values()) for of_site in result["handed_over_per_round"].values())
    both = sum(size for kind, size in result["communication"]["by_kind"].items() if kind in kinds)
    share = result["communication"]["sent_bytes"] / max(1, result["communication"]["total_bytes"])
    return both * share / len(sites) / result["rounds"]


def table(rows: dict[str, Any]) -> None:
    print(f"{'':26} site perf.     all sites'     ensemble       conv. std   sent/round    AUC: site perf.   conv. std")
    for name, row in rows.items():
        if row["n"] == 0:
            print(f"{name:26} no finished run")
            continue
        values = [row["site performance"], row["on all sites' images"], row.get("ensemble")]
        cells = [f"{v['mean']:5.1f} ± {v['std']:4.1f}" if v else " " * 12 for v in values]
        std = f"{row['convergence std']:5.2f}" if "convergence std" in row else "     "
        area = f"{row['AUC']['site performance']['mean']:5.1f}   {row['AUC'].get('convergence std', float('nan')):5.2f}"
        print(f"{name:26} {'   '.join(cells)}   {std}   {row['bytes a site sends in a round'] / 1e6:8.2f} MB   {area}")


def draw_scalability(by_count: dict[str, dict[str, Any]], rows: list[str], file: Path) -> None:
    """Fig. 2: accuracy over the number of sites, a line a method, bars one standard deviation over seeds."""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        points = [
            (int(count), of_count[row]["site performance"])
            for count, of_count in by_count.items()
            if of_count[row]["n"]
        ]
        counts, scores = [count for count, _ in points], [score for _, score in points]
        axes.errorbar(counts, [s["mean"] for s in scores], [s["std"] for s in scores], marker="o", capsize=3, label=row)
    axes.set_xscale("log", base=2)
    axes.set_xticks([int(count) for count in by_count], labels=list(by_count))
    axes.set_xlabel("equal sites")
    axes.set_ylabel("accuracy, %")
    axes.legend()
    figure.savefig(file, dpi=150)
