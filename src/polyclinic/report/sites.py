"""Sections about the sites: how they differ, what left each, what attacks found in it, epsilon; how to run it again."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import tomli_w

from polyclinic.attacks.attack import LEAKS, verdict_word
from polyclinic.data.labels import masked_share
from polyclinic.data.volumes.planes import pictures
from polyclinic.files import human_bytes
from polyclinic.json_types import JsonMapping
from polyclinic.palette import Palette, heat_map, plain, stacked_bars, tidy
from polyclinic.privacy.account import certainty_in_words
from polyclinic.report.blocks import Block, Cell, Chart, Picture, Section, Table, Text, counted, listed
from polyclinic.report.evidence import SHOWN, RunEvidence, drawn_picture, rows_png

#: sites that charts, and pictures, show
MOST_SITES, MOST_SHOWN = 16, 6


def sites_section(run: RunEvidence) -> Section:
    """Images and labels of each site."""
    differ, only_masks = run.result["heterogeneity"], len(run.classes) == 1
    counts = [[site, *(own.get(split) for split in ("train", "validation", "test"))]
              for site, own in run.result["data"]["counts"].items()]  # fmt: skip
    columns = ("site", "training images", "validation images", "test images")
    ks = differ.get("mean_ks")
    if ks is None:
        words = "Images and labels are at the sites; nobody else knows how they differ."
    elif only_masks:
        words = "Images have masks and no labels, so there is no distance (KS) between the sites' labels."
    else:
        how = "hardly differ" if ks < 0.1 else "differ" if ks < 0.5 else "differ very much"
        words = f"The sites' labels {how}: the mean KS between two sites is {ks:.2f}."
    blocks: list[Block] = [Text(words), Table(columns, counts, "Images of each site")]
    if only_masks:  # the share of masked pixels of each site, where its images are at hand
        trains = {name: data.train for name, data in run.images.sites.items() if data.train.masks is not None}
        rows = [[site, f"{masked_share(train.masks):.1%}"] for site, train in trains.items()]
        if rows:
            blocks.append(Table(("site", "masked pixels"), rows, "Share of pixels inside masks, training images"))
    if differ.get("labels") and not only_masks:
        blocks.append(_histograms(run, differ["labels"]))
    if differ.get("pairwise_ks") and len(run.sites) > 1 and not only_masks:
        blocks.append(_ks(run, np.asarray(differ["pairwise_ks"], dtype=float)))
    return Section("sites", "How the sites differ", [*blocks, *_samples(run)])


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
    rows = [pictures(data.train.images[:SHOWN]) for data in sites.values()]
    more = f"; {len(found.sites) - len(sites)} more sites are not shown" if len(found.sites) > len(sites) else ""
    words = (
        f"The first {SHOWN} training images of {listed(list(sites))}, a row for each site{more}. "
        "These are images of the study: whoever gets this report sees them. --no-images leaves them out."
    )
    return [Picture("samples", rows_png(rows), words)]


# --- what left --------------------------------------------------------------------------------------------

#: pictures of an audit, and of the sites' contact sheets, that a report shows
MOST_PICTURES = 8
LEDGER = (
    "Every line of a ledger is chained to the one before it, and this chain was checked for this report. `polyclinic "
    "ledger verify` also checks signatures."
)


def bytes_section(run: RunEvidence) -> Section:
    """Bytes by kind and site, and the ledgers."""
    carried, by_kind = run.result["communication"], run.ledgers.by_kind()
    ways = ""
    if "sent_bytes" in carried:
        sent, received = (human_bytes(int(carried.get(name, 0))) for name in ("sent_bytes", "received_bytes"))
        ways = f": {sent} left the sites and {received} came to them"
    words = f"In all {human_bytes(int(carried['total_bytes']))} were carried{ways}."
    blocks: list[Block] = [Text(f"{words} These are the sizes of encoded parcels, not estimates.")]
    if by_kind:
        blocks += [_left(by_kind), _ledger_table(run), Text(LEDGER, "note")]
    elif not run.ledgers.broken:
        blocks.append(Text("The sites' ledgers are not in this folder: at a deployed run they stay at the sites."))
    for name, column in (("by_kind", "kind"), ("per_site", "site")):  # what the coordinator counted
        rows = [[str(key), human_bytes(int(size)), int(size)] for key, size in carried[name].items()]
        blocks.append(Table((column, "carried", "bytes"), rows, f"Carried in both directions, by {column}"))
    blocks += [Text(f"The ledger of {site} does not hold: {why}.", "note") for site, why in run.ledgers.broken.items()]
    return Section("bytes", "What left each site", blocks)


def _left(by_kind: dict[str, Counter[str]]) -> Chart:
    kinds = sorted({kind for counts in by_kind.values() for kind in counts})
    rows = {site: [int(own[kind]) for kind in kinds] for site, own in by_kind.items()}
    few = dict(list(rows.items())[:MOST_SITES])

    def draw(axes: Any, theme: Palette) -> None:
        stacked_bars(axes, theme, few, kinds, "left the site")
        axes.xaxis.set_major_formatter(lambda value, _: human_bytes(value))
        axes.xaxis.get_major_locator().set_params(nbins=5)

    note = f"The first {MOST_SITES} of {len(rows)} sites." if len(rows) > MOST_SITES else ""
    table = Table(("site", *kinds), [[site, *own] for site, own in rows.items()])
    return Chart("left", "Bytes that left each site, by kind", draw, table, note, (6.4, 1.3 + 0.32 * len(few)))


def _ledger_table(run: RunEvidence) -> Table:
    rows: list[list[Cell]] = []
    for site, lines in run.ledgers.lines.items():
        for kind in sorted({str(line["kind"]) for line in lines}):
            mine = [line for line in lines if str(line["kind"]) == kind]
            size = human_bytes(sum(int(line["bytes"]) for line in mine))
            receivers = ", ".join(sorted({str(line["to"]) for line in mine}))
            rows.append([site, kind, len(mine), size, receivers, sum(bool(line.get("privacy")) for line in mine)])
    columns = ("site", "kind", "lines", "bytes", "to", "lines with a privacy record")
    return Table(columns, rows, "The ledgers summed up")


def sheets_section(run: RunEvidence) -> Section | None:
    """Pictures that the run's sites drew: replayed and synthetic images. They show images of the sites."""
    pictures = []
    for file in sorted((run.folder / "sites").glob("*/*.png"))[:MOST_PICTURES] if run.show_images else []:
        if content := drawn_picture(run.folder, file.relative_to(run.folder)):
            words = f"{file.parent.name}: {file.stem.replace('_', ' ')}, as the site drew it."
            pictures.append(Picture(f"sheet-{file.parent.name}-{file.stem}", content, words))
    return Section("sheets", "Contact sheets", pictures) if pictures else None


def audit_section(run: RunEvidence) -> Section:
    """Findings of attacks in the parcels that left."""
    audit, title = run.audit, "What an attacker recovered"
    if audit is None:
        cure = f"`polyclinic audit {run.folder.name}` attacks what left"
        kept = " (the study must have a table [audit], so that sites keep what left)"
        return Section("audit", title, [Text(f"Nothing was attacked. {cure}{kept}.")])
    blocks: list[Block] = [Text(str(audit.get("threat_model") or "The audit does not say what the attacker has."))]
    if not audit.get("complete", True):
        blocks.append(Text("The audit is not complete: it was stopped, or is still running.", "note"))
    rows = [
        [str(kind), one.get("left"), verdict_word(one), str(one.get("words", "")),
         "; ".join(map(str, one.get("not_tried", []))) or "–"]
        for kind, one in audit.get("verdicts", {}).items()
    ]  # fmt: skip
    blocks.append(Table(("kind", "left", "verdict", "in words", "not tried"), rows, "Verdicts by kind"))
    blocks += _both_sides(audit.get("epsilon") or {})
    blocks += _single_patients(audit.get("patients") or {})
    return Section("audit", title, [*blocks, *_findings(audit), *(_pictures(run, audit) if run.show_images else [])])


def _both_sides(found: JsonMapping) -> list[Block]:
    """Epsilon from both sides, where a site's private training was audited."""
    if not found:
        return []
    said = Text(f"Epsilon from both sides: {found.get('words', '')}.", "note" if found.get("alarm") else "text")
    rows = [[one.get(name) for name in ("name", "chance", "words")] for one in found.get("checks", [])]
    title = "What the accountant takes for granted, and how often chance looks as bad"
    return [said, Table(("check", "chance", "found"), rows, title)] if rows else [said]


def _single_patients(found: JsonMapping) -> list[Block]:
    """The verdict on single patients, and the gaps between groups of them; nobody is named."""
    if not found:
        return []
    rows = [
        [
            site,
            *(gap.get(name) for name in ("group", "patients", "gap", "low", "high")),
            "yes" if gap.get("rare") else "",
        ]
        for site, gaps in found.get("groups", {}).items()
        for gap in gaps
    ]
    words = Text(f"Single patients: {verdict_word(found)}. {found.get('words', '')}.")
    columns = ("site", "group", "patients", "gap", "from", "to", "rare")
    title = "Mean risk of a group less that of all others (95 % interval)"
    return [words, Table(columns, rows, title)] if rows else [words]


def _every_finding(audit: JsonMapping) -> Iterator[tuple[JsonMapping, JsonMapping]]:
    """Each parcel that was attacked, and what one attack found in it."""
    for parcel in audit.get("parcels", []):
        yield from ((parcel, found) for found in parcel.get("findings", []))


def _findings(audit: JsonMapping) -> list[Block]:
    """The figures of every finding, a line each."""
    rows = []
    for parcel, found in _every_finding(audit):
        evidence = found.get("evidence", {}).items()
        figures = ", ".join(f"{name} {value}" for name, value in evidence if isinstance(value, int | float))
        who = [str(parcel.get("site")), parcel.get("round"), str(parcel.get("kind")), str(found.get("attack"))]
        rows.append([*who, verdict_word(found), figures])
    columns = ("site", "round", "kind", "attack", "verdict", "figures")
    return [Table(columns, rows, "Evidence of every attack")] if rows else []


def recovered(audit: JsonMapping) -> tuple[int, int] | None:
    """Images that the strongest attack recovered, and how many it was tried on; None where none rebuilds images."""
    every = (found.get("evidence", {}) for _, found in _every_finding(audit))
    counts = [(one.get("recovered"), one.get("images")) for one in every]
    found = [one for one in counts if isinstance(one[0], int) and isinstance(one[1], int)]
    return max(found, key=lambda one: (one[0] / max(1, one[1]), one[1])) if found else None


def _pictures(run: RunEvidence, audit: JsonMapping) -> list[Block]:
    drawn = [(parcel, found) for parcel, found in _every_finding(audit) if found.get("picture")]
    blocks: list[Block] = []
    for parcel, found in sorted(drawn, key=lambda pair: verdict_word(pair[1]) != LEAKS)[:MOST_PICTURES]:
        if content := drawn_picture(run.folder, found["picture"]):
            words = f"{parcel.get('site')}, round {parcel.get('round')}, {parcel.get('kind')}: {found.get('attack')}."
            blocks.append(Picture(f"audit-{len(blocks)}", content, words))
    if len(drawn) > len(blocks) and blocks:
        blocks.append(Text(f"{counted(len(drawn) - len(blocks), 'more picture')} of the audit are in the run folder."))
    return blocks


def privacy_section(run: RunEvidence) -> Section:
    """Epsilon at each site, and what it covers."""
    blocks: list[Block] = [Text(privacy_words(run))]
    per_site = (run.result.get("privacy") or {}).get("per_site", {})
    if per_site:
        names = list(next(iter(per_site.values())))
        rows = [[site, *map(own.get, names)] for site, own in per_site.items()]
        columns = ("site", *(name.replace("_", " ") for name in names))
        blocks.append(Table(columns, rows, "What each site spent"))
    return Section("privacy", "Differential privacy", blocks)


def privacy_words(run: RunEvidence) -> str:
    """A sentence about what epsilon covers and what not."""
    privacy = run.result.get("privacy")
    if not privacy:
        return "There was no differential privacy: no epsilon bounds what can be learnt about one patient."
    unit = "a patient with all images" if privacy.get("unit") == "patient" else "one image"
    spent = f"epsilon {float(privacy['epsilon']):.3g} at delta {float(privacy['delta']):.2g}"
    covers, not_covered = ("; ".join(map(str, privacy[name])) for name in ("covers", "does_not_cover"))
    return (
        f"Differential privacy spent {spent} at most (site {privacy.get('site', 'unknown')}); it is for {unit}. "
        f"It covers {covers}. It does not cover {not_covered or 'nothing that left'}. In words: "
        f"{certainty_in_words(float(privacy['epsilon']), float(privacy['delta']))}."
    )


# --- how to run it again ----------------------------------------------------------------------------------

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
