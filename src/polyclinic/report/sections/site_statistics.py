"""What the sites of a deployed run computed from their own cases, and told coarsely; what each site adds."""

from __future__ import annotations

from typing import Any

from polyclinic.json_types import JsonMapping
from polyclinic.report.blocks import Block, Section, Table, Text
from polyclinic.report.evidence import RunEvidence
from polyclinic.report.metric_names import metric_name
from polyclinic.report.sections.scores import forest

#: begin the names of differences between two models
CHANGE = "change of "
MEAN = "mean over sites"
WORDS = "Each site computed these figures from its own cases, by patient. No score of a single image left a site."
COARSE = (
    "Sites tell them in steps that are no smaller than what one patient can change, and round the ends of intervals "
    "outwards."
)
#: columns of a table with intervals
HEAD = ("value", "low", "high")


def section(run: RunEvidence) -> Section | None:
    """Intervals, paired tests, sub-groups and calibration; None where the sites told none."""
    told = run.result.get("safe_statistics")
    if not told or not told.get("per_site"):
        return None
    rows = {MEAN: told.get("mean", {}), **told["per_site"]}
    blocks: list[Block] = [Text(f"{WORDS} {COARSE}" if run.is_deployed else WORDS)]
    main = {site: _named(one[run.metric]) for site, one in rows.items() if run.metric in one}
    if main:
        blocks.append(forest(f"told-{run.metric}", "95 % intervals of the sites", run.metric, main, run.unit))
    names = dict.fromkeys(name for one in rows.values() for name in one)
    plain = [name for name in names if not name.startswith(CHANGE) and " = " not in name]
    groups = [name for name in names if " = " in name]
    changes = [name for name in names if name.startswith(CHANGE)]
    blocks.append(_table(rows, plain, "Metrics with 95 % intervals"))
    if changes:
        blocks.append(_table(rows, changes, "Differences of two models on the same patients", told.get("p_of_change")))
        blocks.append(Text("The p value is that of the mean over sites, from the sites' variances.", "note"))
    if groups:
        blocks.append(_table(rows, groups, "Sub-groups"))
        blocks.append(Text("Groups of few patients, and others from which these would follow, are left out.", "note"))
    blocks += _calibration(told.get("calibration", {}))
    blocks += [Text(str(note)[0].upper() + str(note)[1:] + ".", "note") for note in told.get("notes", []) if note]
    return Section("told", "What the sites computed themselves", blocks)


def _named(row: list[float]) -> dict[str, float]:
    return dict(zip(HEAD, row, strict=False))


def _table(rows: JsonMapping, names: list[str], title: str, chances: JsonMapping | None = None) -> Table:
    cells: list[list[Any]] = []
    for name in names:
        for site, one in rows.items():
            if name in one:
                chance = [] if chances is None else [chances.get(name) if site == MEAN else None]
                cells.append([_words(name), site, *(float(number) for number in one[name][:3]), *chance])
    return Table(("", "site", *HEAD, *([] if chances is None else ["p"])), cells, title)


def _words(name: str) -> str:
    """`change of AUC by DeLong`; a sub-group keeps the name that its site gave it."""
    return name if " = " in name else " ".join(metric_name(word) for word in name.split())


def _calibration(counts: JsonMapping) -> list[Block]:
    """Images of all sites by the probability of the class that was said, and how many of them were right."""
    tables = [one for one in counts.values() if one.get("bins") and one.get("right")]
    if not tables:
        return []
    bins, right = (
        [sum(column) for column in zip(*(one[name] for one in tables), strict=True)] for name in ("bins", "right")
    )
    rows = [
        [
            f"{number / len(bins):.0%} to {(number + 1) / len(bins):.0%}",
            images,
            right[number] / images if images else None,
        ]
        for number, images in enumerate(bins)
    ]
    head = ("probability of the class that was said", "images", "share that was right")
    return [Table(head, rows, "Calibration, all sites together"), Text("Bins of few patients are empty.", "note")]


def worth_section(run: RunEvidence) -> Section | None:
    """What each site adds; None where the study did not ask."""
    worth = run.result.get("worth")
    if not worth:
        return None
    rows = [
        [site, one["leave_one_out"], one["shapley"], one.get("low"), one.get("high")]
        for site, one in worth["sites"].items()
    ]
    blocks: list[Block] = [
        Text(f"A model's value is {worth['value']}: {worth['all']:.4g} with all sites, {worth['none']:.4g} with none."),
        Table(("site", "without it, worse by", "Shapley value", "low", "high"), rows, "What each site adds"),
        Text(f"Shapley values add up to what training together brings ({worth['how']}).", "note"),
    ]
    return Section("worth", "What each site adds", blocks)
