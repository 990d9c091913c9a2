"""How training went: validation metrics and bytes by round; what serial methods forget; how far sites' models agree."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyclinic.palette import Palette
from polyclinic.report.blocks import Block, Cell, Chart, Section, Table, Text
from polyclinic.report.evidence import RunEvidence
from polyclinic.report.metric_names import LOWER, metric_name
from polyclinic.report.theme import heat_map, legend, plain, tidy

MOST_LINES = 8


def section(run: RunEvidence) -> Section:
    scored = [line for line in run.history if line.get("validation")]
    often = "once" if scored else "never"
    curve: Block = Text(f"Validation images were scored {often}: there is no curve.")
    if len(scored) > 1:
        curve = _curve(run, scored)
    return Section("course", "How training went", [curve, *_forgotten(run), *_convergence(run)])


def _curve(run: RunEvidence, lines: list[dict[str, Any]]) -> Chart:
    metric, rounds = run.metric, [line["round"] for line in lines]
    pooled = [line["validation"].get("pooled", {}).get(metric, np.nan) for line in lines]
    sites = [site for site in run.sites if any(site in line["validation"].get("per_site", {}) for line in lines)]
    each = {
        site: [line["validation"].get("per_site", {}).get(site, {}).get(metric, np.nan) for line in lines]
        for site in sites
    }
    rows = [
        [r, _cell(p), *(_cell(values[i]) for values in each.values())]
        for i, (r, p) in enumerate(zip(rounds, pooled, strict=True))
    ]
    table = Table(("round", "all sites together", *sites), rows)
    released = run.result["selected"]["round"]

    def draw(figure: Any, theme: Palette) -> None:
        axes = figure.subplots()
        for i, (site, values) in enumerate(list(each.items())[:MOST_LINES]):
            axes.plot(rounds, values, label=plain(site), alpha=0.75, **theme.line(i + 1) | {"linewidth": 1.1})
        axes.plot(rounds, pooled, label="all sites together", **theme.line(0) | {"linewidth": 2.6})
        if released in rounds:
            axes.axvline(released, color=theme.faint, linewidth=1, linestyle=":")
            axes.annotate("released", (released, 1), xycoords=("data", "axes fraction"), fontsize=8, color=theme.faint,
                          ha="right", va="top", rotation=90)  # fmt: skip
        axes.xaxis.get_major_locator().set_params(integer=True)
        unit = f" ({plain(run.unit)})" if run.unit and run.like == "regression" else ""
        tidy(axes, theme, x="round", y=f"validation {metric_name(metric)}{unit}")
        legend(axes, theme, loc="upper left", bbox_to_anchor=(1, 1))

    better = "Lower" if metric in LOWER else "Higher"
    more = f" The first {MOST_LINES} of {len(sites)} sites are drawn." if len(sites) > MOST_LINES else ""
    return Chart("curve", f"Validation {metric_name(metric)} by round", draw, table, f"{better} is better.{more}")


def _cell(value: Any) -> Cell:
    return float(value) if isinstance(value, int | float) and np.isfinite(value) else None


def _forgotten(run: RunEvidence) -> list[Block]:
    """What each hand-over of a serial method made of each site's images (`polyclinic forgetting`)."""
    found = run.forgetting
    if found is None:
        kept = (run.folder / "handovers").is_dir()
        return (
            [Text("`polyclinic forgetting` on this run shows what each hand-over forgot of other sites.")]
            if kept
            else []
        )
    blocks: list[Block] = []
    for number, table in found["rounds"].items():
        sites = list(table)
        grid = np.array([[table[site].get(turn, np.nan) for turn in sites] for site in sites], dtype=float)
        title = f"Forgetting in round {number}: {metric_name(str(found['metric']))} of {found['split']} images"
        note = "A row for each site's images; a column for the site that trained last."
        blocks.append(matrix(f"forgetting-{number}", title, grid, sites, sites, note))
    return blocks


def _convergence(run: RunEvidence) -> list[Block]:
    """Where each site has a model: each model on the images of each site."""
    across = run.result["metrics"].get("across_sites")
    if not across:
        return []
    models = list(across)
    sites = [site for site in run.sites if any(site in of_model for of_model in across.values())]
    grid = np.array([[across[model].get(site, {}).get(run.metric, np.nan) for site in sites] for model in models])
    note = "A row for each site's model; a column for the site whose test images it judges."
    return [
        matrix("convergence", f"Each site's model on each site: {metric_name(run.metric)}", grid, models, sites, note)
    ]


def matrix(key: str, title: str, grid: np.ndarray, rows: list[str], columns: list[str], note: str) -> Chart:
    """A heat map with its table."""
    table = Table(("", *columns), [[name, *map(_cell, row)] for name, row in zip(rows, grid, strict=True)])
    finite = grid[np.isfinite(grid)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    size = (min(6.4, 2.4 + 0.55 * len(columns)), min(6.4, 1.6 + 0.42 * len(rows)))

    def draw(figure: Any, theme: Palette) -> None:
        heat_map(figure.subplots(), theme, grid, rows, columns, low=low, high=high)

    return Chart(key, title, draw, table, note, size)
