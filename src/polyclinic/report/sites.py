"""Sections about the study: how the sites differ (images of each, labels, KS of each pair), and how to run it again."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import tomli_w

from polyclinic.data.labels import masked_share
from polyclinic.palette import Palette, heat_map, plain, stacked_bars, tidy
from polyclinic.report.blocks import Block, Chart, Picture, Section, Table, Text
from polyclinic.report.evidence import SHOWN, RunEvidence, rows_png
from polyclinic.report.metric_names import listed

#: sites that charts, and pictures, show
MOST_SITES, MOST_SHOWN = 16, 6


def sites_section(run: RunEvidence) -> Section:
    """Images and labels of each site."""
    differ, only_masks = run.result["heterogeneity"], len(run.classes) == 1
    counts = [[site, *(own.get(split) for split in ("train", "validation", "test"))]
              for site, own in run.result["data"]["counts"].items()]  # fmt: skip
    columns = ("site", "training images", "validation images", "test images")
    blocks: list[Block] = [Text(_how_different(run)), Table(columns, counts, "Images of each site")]
    if only_masks:
        blocks += _masked(run)
    if differ.get("labels") and not only_masks:
        blocks.append(_histograms(run, differ["labels"]))
    if differ.get("pairwise_ks") and len(run.sites) > 1 and not only_masks:
        blocks.append(_ks(run, np.asarray(differ["pairwise_ks"], dtype=float)))
    return Section("sites", "How the sites differ", [*blocks, *_samples(run)])


def _how_different(run: RunEvidence) -> str:
    ks = run.result["heterogeneity"].get("mean_ks")
    if ks is None:
        return "Images and labels are at the sites; nobody else knows how they differ."
    if len(run.classes) == 1:
        return "Images have masks and no labels, so there is no distance (KS) between the sites' labels."
    how = "hardly differ" if ks < 0.1 else "differ" if ks < 0.5 else "differ very much"
    return f"The sites' labels {how}: the mean KS between two sites is {ks:.2f}."


def _masked(run: RunEvidence) -> list[Block]:
    """The share of masked pixels of each site, where its images are at hand."""
    sites = {name: data.train for name, data in run.images.sites.items() if data.train.masks is not None}
    rows = [[site, f"{masked_share(train.masks):.1%}"] for site, train in sites.items()]
    title = "Share of pixels inside masks, training images"
    return [Table(("site", "masked pixels"), rows, title)] if rows else []


def _histograms(run: RunEvidence, labels: dict[str, Any]) -> Chart:
    per_site = {site: [int(n) for n in own] for site, own in labels["per_site"].items()}
    edges = labels["edges"]
    names = run.classes if edges is None else [f"{a:.4g} to {b:.4g}" for a, b in itertools.pairwise(edges)]
    table = Table(("site", *names), [[site, *own] for site, own in per_site.items()])
    few = dict(list(per_site.items())[:MOST_SITES])
    title = "Training labels of each site"
    note = f"The first {MOST_SITES} of {len(per_site)} sites." if len(per_site) > MOST_SITES else ""

    def bars(axes: Any, theme: Palette) -> None:
        stacked_bars(axes, theme, few, names, "training images")

    def ridges(panels: Any, theme: Palette) -> None:
        for i, (axes, (site, own)) in enumerate(zip(np.atleast_1d(panels), few.items(), strict=True)):
            axes.stairs(own, np.asarray(edges, dtype=float), fill=True, color=theme.colour(i), alpha=0.85)
            tidy(axes, theme, x=(plain(run.unit) or "label") if i == len(few) - 1 else "", grid="")
            axes.set_yticks([])
            axes.spines["left"].set_visible(False)
            axes.set_ylabel(plain(site), rotation=0, ha="right", va="center", fontsize=8.5, color=theme.ink)

    if edges is None:
        return Chart("labels", title, bars, table, note, (6.4, 1.2 + 0.32 * len(few)))
    return Chart("labels", title, ridges, table, note, (6.4, 0.9 + 0.55 * len(few)), panels=len(few))


def _ks(run: RunEvidence, grid: np.ndarray) -> Chart:
    sites, shown = run.sites[: len(grid)], grid.copy()
    table = Table(("site", *sites), [[site, *map(float, row)] for site, row in zip(sites, grid, strict=True)])
    np.fill_diagonal(shown, np.nan)

    def draw(axes: Any, theme: Palette) -> None:
        heat_map(axes, theme, shown, (sites, sites))

    side, note = min(6.0, 2.2 + 0.42 * len(sites)), "0: same labels; 1: no overlap."
    return Chart("ks", "KS statistic of each pair of sites", draw, table, note, (side, side))


def _samples(run: RunEvidence) -> list[Block]:
    found = run.images
    if found.why_none:
        return [Text(found.why_none)]
    sites = {name: data for name, data in list(found.sites.items())[:MOST_SHOWN] if len(data.train)}
    if not sites:
        return []
    rows = [np.asarray(data.train.images[:SHOWN]) for data in sites.values()]
    more = f"; {len(found.sites) - len(sites)} more sites are not shown" if len(found.sites) > len(sites) else ""
    words = (
        f"The first {SHOWN} training images of {listed(list(sites))}, a row for each site{more}. "
        "These are images of the study: whoever gets this report sees them. --no-images leaves them out."
    )
    return [Picture("samples", rows_png(rows), words)]


AGAIN = (
    "`polyclinic run study.toml --out again` with the study below, the same images and the same versions gives "
    "the same weights: compare their SHA-256. Another processor may round otherwise."
)


def reproduce_section(run: RunEvidence) -> Section:
    """The study, versions, seeds and digests: how to run it again."""
    result = run.result
    facts = {
        "seed": result["seed"],
        "weights (SHA-256)": result["weights_sha256"],
        "seconds": result["timing"].get("seconds"),
        **{f"{split} images (SHA-256)": digest for split, digest in result["data"].get("digests", {}).items()},
    }
    blocks: list[Block] = [Text(AGAIN)]
    for title, table in {"Seeds and digests": facts, "Versions and machine": result["environment"]}.items():
        rows = [[name, one if isinstance(one, str) else json.dumps(one)] for name, one in table.items()]
        blocks.append(Table(("", ""), rows, title))
    blocks.append(Table(("file", "SHA-256"), sorted(run.sources.items()), "Files that this report was made of"))
    blocks.append(Text(tomli_w.dumps(run.study), "code"))
    return Section("again", "How to run it again", blocks)
