"""How the sites differ: images of each, histograms of labels, KS between each pair, and some images."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from polyclinic.data.labels import masked_share
from polyclinic.palette import Palette
from polyclinic.report.blocks import Block, Chart, Picture, Section, Table, Text
from polyclinic.report.evidence import RunEvidence
from polyclinic.report.metric_names import listed
from polyclinic.report.pictures import SHOWN, rows_png
from polyclinic.report.theme import heat_map, plain, stacked_bars, tidy

#: sites of which charts show each
MOST_SITES = 16


def section(run: RunEvidence) -> Section:
    blocks: list[Block] = [_words(run), _counts(run)]
    if len(run.classes) == 1:  # masks without labels
        return Section("sites", "How the sites differ", [*blocks, *_masked(run), *_samples(run)])
    labels = run.result["heterogeneity"].get("labels")
    if labels:
        blocks.append(_histograms(run, labels))
    if run.result["heterogeneity"].get("pairwise_ks") and len(run.sites) > 1:
        blocks.append(_ks(run))
    return Section("sites", "How the sites differ", [*blocks, *_samples(run)])


def _words(run: RunEvidence) -> Text:
    ks = run.result["heterogeneity"].get("mean_ks")
    if ks is None:
        return Text("Images and labels are at the sites; nobody else knows how they differ.")
    if len(run.classes) == 1:
        return Text("Images have masks and no labels, so there is no distance (KS) between the sites' labels.")
    how = "hardly differ" if ks < 0.1 else "differ" if ks < 0.5 else "differ very much"
    return Text(f"The sites' labels {how}: the mean KS between two sites is {ks:.2f}.")


def _counts(run: RunEvidence) -> Table:
    splits = ("train", "validation", "test")
    counts = run.result["data"]["counts"]
    rows = [[site, *(own.get(split) for split in splits)] for site, own in counts.items()]
    return Table(("site", "training images", "validation images", "test images"), rows, "Images of each site")


def _masked(run: RunEvidence) -> list[Block]:
    """The share of masked pixels of each site, where its images are at hand."""
    sites = {name: data.train for name, data in run.images.sites.items() if data.train.masks is not None}
    if run.images.why_none or not sites:
        return []
    rows = [[site, f"{masked_share(train.masks):.1%}"] for site, train in sites.items()]
    return [Table(("site", "masked pixels"), rows, "Share of pixels inside masks, training images")]


def _histograms(run: RunEvidence, labels: dict[str, Any]) -> Chart:
    per_site = {site: [int(n) for n in own] for site, own in labels["per_site"].items()}
    edges = labels["edges"]
    names = run.classes if edges is None else [f"{a:.4g} to {b:.4g}" for a, b in itertools.pairwise(edges)]
    table = Table(("site", *names), [[site, *own] for site, own in per_site.items()])
    few = dict(list(per_site.items())[:MOST_SITES])

    def draw(figure: Any, theme: Palette) -> None:
        if edges is None:
            stacked_bars(figure.subplots(), theme, few, names, "training images")
        else:
            _ridges(figure, theme, few, np.asarray(edges, dtype=float), run.unit)

    note = f"The first {MOST_SITES} of {len(per_site)} sites." if len(per_site) > MOST_SITES else ""
    height = 1.2 + 0.32 * len(few) if edges is None else 0.9 + 0.55 * len(few)
    return Chart("labels", "Training labels of each site", draw, table, note, (6.4, height))


def _ridges(figure: Any, theme: Palette, counts: dict[str, list[int]], edges: np.ndarray, unit: str) -> None:
    rows = figure.subplots(len(counts), 1, sharex=True, squeeze=False)[:, 0]
    for i, (axes, (site, own)) in enumerate(zip(rows, counts.items(), strict=True)):
        axes.stairs(own, edges, fill=True, color=theme.colour(i), alpha=0.85)
        tidy(axes, theme, grid="")
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_ylabel(plain(site), rotation=0, ha="right", va="center", fontsize=8.5, color=theme.ink)
    rows[-1].set_xlabel(plain(unit) or "label", color=theme.ink, fontsize=9)


def _ks(run: RunEvidence) -> Chart:
    grid = np.asarray(run.result["heterogeneity"]["pairwise_ks"], dtype=float)
    sites = run.sites[: len(grid)]
    table = Table(("site", *sites), [[site, *map(float, row)] for site, row in zip(sites, grid, strict=True)])
    side = min(6.0, 2.2 + 0.42 * len(sites))

    def draw(figure: Any, theme: Palette) -> None:
        heat_map(figure.subplots(), theme, grid, sites, sites, low=0, high=1, empty_diagonal=True)

    return Chart(
        "ks", "KS statistic of each pair of sites", draw, table, "0: same labels; 1: no overlap.", (side, side)
    )


def _samples(run: RunEvidence) -> list[Block]:
    found = run.images
    if found.why_none:
        return [Text(found.why_none)]
    sites = {name: data for name, data in list(found.sites.items())[:6] if len(data.train)}
    if not sites:
        return []
    rows = [np.asarray(data.train.images[:SHOWN]) for data in sites.values()]
    words = (
        f"The first {SHOWN} training images of {listed(list(sites))}, a row for each site"
        f"{f'; {len(found.sites) - len(sites)} more sites are not shown' if len(found.sites) > len(sites) else ''}. "
        "These are images of the study: whoever gets this report sees them. --no-images leaves them out."
    )
    return [Picture("samples", rows_png(rows), words)]
