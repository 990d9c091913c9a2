"""Sections about how good the model is: metrics of all sites and of each, with intervals; sub-groups by a column; what
the sites of a deployed run computed themselves; what each site adds; how training went, and what it forgot."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from polyclinic.json_types import JsonMapping
from polyclinic.palette import Palette, heat_map, legend, plain, tidy
from polyclinic.report.blocks import LOWER, Block, Cell, Chart, Section, Table, Text, metric_name
from polyclinic.report.evidence import RunEvidence
from polyclinic.runner.evaluate.case_statistics import FEWEST, intervals_of, metrics_of
from polyclinic.runner.evaluate.rounded_scores import ROUNDED, in_words
from polyclinic.runner.run.result_display import few_images, image_counts

ALL, MEAN = "all sites together", "mean over sites"
#: groups of a column that are shown, the largest first; rows of a chart with intervals; sites of a learning curve
MOST_GROUPS, MOST_ROWS, MOST_LINES = 24, 40, 8
#: an interval, as tables have it
INTERVAL = ("value", "low", "high")


def scores_section(run: RunEvidence) -> Section:
    """Metrics of the released model."""
    if not run.scores["pooled"]:
        return Section("scores", "How good the model is", [Text("Nothing was evaluated.")])
    basis = f"One model, on {run.split} images: of all sites together, as a mean over sites, and of each site."
    if run.personal:
        basis = (
            "Each site has a model of its own. 'All sites together' is the mean over the models, each on the images of "
            "all sites; a site's row is its own model on its own images."
        )
    blocks: list[Block] = [Text(basis), _metrics(run)]
    intervals = run.result["metrics"].get("intervals", {})
    rows = {"each by its own model" if run.personal else ALL: intervals.get("pooled", {})}
    rows |= intervals.get("per_site", {})
    if known := {name: own[run.metric] for name, own in rows.items() if run.metric in own}:
        title = f"{_title(run.metric)} with 95 % intervals"
        blocks.append(forest(f"scores-{run.metric}", title, known, run.metric, run.unit))
    return Section("scores", "How good the model is", [*blocks, Text(_limits(run), "note")])


def _title(name: str) -> str:
    words = metric_name(name)
    return words[:1].upper() + words[1:]


def _limits(run: RunEvidence) -> str:
    parts = []
    intervals = run.result["metrics"].get("intervals", {})
    if intervals.get("pooled"):
        unit = intervals["unit"]
        parts.append(f"Intervals are a bootstrap over {unit}s: they say how sure a figure is for patients like these.")
        parts.append(f"A site with fewer than {FEWEST} {unit}s has none.")
        parts.append("An interval without width comes from images that are all alike, and is no certainty.")
        if run.like == "classification":
            exact = "The AUC of the table is counted in bins; that of intervals and curves is exact."
            parts.append(f"{exact} They differ a little.")
            parts.append("ECE and Brier score are of what the network says; the calibration chart has both.")
    if run.result["metrics"].get("rounding"):
        parts.append(f"{ROUNDED[:1].upper()}{ROUNDED[1:]}.")
    if run.split == "validation":
        parts.append("Validation images also chose the round: such figures are too good.")
    if few := few_images(image_counts(run.result, run.split), run.scores["per_site"]):
        parts.append(f"{few[:1].upper()}{few[1:]}.")
    return " ".join([*parts, "They do not say how the model does at another hospital."])


def _metrics(run: RunEvidence) -> Table:
    """Of deployed sites, whose policies round scores, what each figure lies between."""
    rounded = run.result["metrics"].get("rounding", {})
    scores, calibration = run.scores, run.result["metrics"].get("calibration", {})
    names, extra = list(scores["pooled"]), list(calibration.get("pooled", {}))
    # of models of each site the calibration is of each image by its own site's model: not what this row is about
    of_all = {} if run.personal else calibration.get("pooled", {})
    of_sites = calibration.get("per_site", {})
    counts = image_counts(run.result, run.split)
    rows: list[list[Cell]] = [
        [ALL, sum(counts.values()) or None, *_values(scores["pooled"], names), *_values(of_all, extra)],
        *([[MEAN, None, *_values(scores["mean"], names), *_values({}, extra)]] if scores["mean"] else []),
    ]
    for site, own in scores["per_site"].items():
        rows.append([site, counts.get(site), *_values(own, names), *_values(of_sites.get(site, {}), extra)])
    if rounded:
        known = {ALL: rounded["pooled"], MEAN: rounded["mean"], **rounded["per_site"]}
        for row in rows:
            row[2 : 2 + len(names)] = [in_words(known.get(str(row[0]), {}), name) for name in names]
    columns = ("", "images", *map(metric_name, [*names, *extra]))
    return Table(columns, rows, f"Metrics on {run.split} images")


def _values(metrics: JsonMapping, names: list[str]) -> list[Cell]:
    return [float(metrics[name]) if isinstance(metrics.get(name), int | float) else None for name in names]


def forest(
    key: str, title: str, rows: Mapping[str, Mapping[str, float]], metric: str, unit: str, note: str = ""
) -> Chart:
    """A value with its interval for each row."""
    few = dict(list(rows.items())[:MOST_ROWS])
    cells = [[name, *(float(one[end]) for end in INTERVAL)] for name, one in rows.items()]

    def draw(axes: Any, theme: Palette) -> None:
        for y, one in enumerate(few.values()):
            axes.plot([one["low"], one["high"]], [y, y], color=theme.colour(0), linewidth=2.2, solid_capstyle="round")
            axes.plot([one["value"]], [y], marker="o" if y else "D", color=theme.colour(1), markersize=6)
        axes.set_yticks(range(len(few)), [plain(name) for name in few])
        axes.set_ylim(len(few) - 0.5, -0.5)
        tidy(axes, theme, x=f"{metric_name(metric)}{f' ({plain(unit)})' if unit else ''}", grid="x")

    table = Table(("", metric_name(metric), "low", "high"), cells)
    return Chart(key, title, draw, table, note, (6.4, 1.1 + 0.3 * len(few)))


def subgroups(run: RunEvidence, column: str) -> Section:
    """Metrics of the images that share a value of a column."""
    cases = run.judged
    assert cases is not None, "asked for only where cases were kept"
    values = cases.column(column)
    names, counts = np.unique(values, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:MOST_GROUPS]
    parts = {str(names[i]): cases.take(np.flatnonzero(values == names[i])) for i in order}
    found = {name: metrics_of(part) for name, part in parts.items()}
    metrics = list(dict.fromkeys(metric for one in found.values() for metric in one))
    intervals = {name: intervals_of(part, ("by", column, name)) for name, part in parts.items()}
    rows = [[name, len(parts[name]), *(one.get(metric) for metric in metrics)] for name, one in found.items()]
    columns = (column, "images", *map(metric_name, metrics))
    blocks: list[Block] = [Table(columns, rows, f"{run.split} images by {column}")]
    if known := {name: vars(own[run.metric]) for name, own in intervals.items() if run.metric in own}:
        blocks.append(forest(f"by-{column}", f"{_title(run.metric)} by {column}", known, run.metric, run.unit))
    many = f" The {MOST_GROUPS} largest of {len(names)} groups are shown." if len(names) > MOST_GROUPS else ""
    note = f"Groups with fewer than {FEWEST} patients have no interval. Many groups: some differ by chance alone.{many}"
    return Section(f"by-{column}", f"By {column}", [*blocks, Text(note, "note")])


# --- figures that the sites of a deployed run computed themselves ---------------------------------------

#: begins the names of differences between two models
CHANGE = "change of "
OWN = "Each site computed these figures from its own cases, by patient. No score of a single image left a site."
COARSE = " Sites tell them in steps no smaller than what one patient can change, and round intervals outwards."


def site_statistics(run: RunEvidence) -> Section | None:
    """Intervals, paired tests, sub-groups and calibration; None where the sites told none."""
    told = run.result.get("safe_statistics")
    if not told or not told.get("per_site"):
        return None
    rows = {MEAN: told.get("mean", {}), **told["per_site"]}
    blocks: list[Block] = [Text(OWN + (COARSE if run.is_deployed else ""))]
    if main := {
        site: dict(zip(INTERVAL, one[run.metric], strict=False)) for site, one in rows.items() if run.metric in one
    }:
        blocks.append(forest(f"told-{run.metric}", "95 % intervals of the sites", main, run.metric, run.unit))
    names = dict.fromkeys(name for one in rows.values() for name in one)
    groups = [name for name in names if " = " in name]
    changes = [name for name in names if name.startswith(CHANGE)]
    others = [name for name in names if name not in {*groups, *changes}]
    blocks.append(_told(rows, others, "Metrics with 95 % intervals"))
    if changes:
        title = "Differences of two models on the same patients"
        blocks.append(_told(rows, changes, title, told.get("p_of_change")))
        blocks.append(Text("The p value is that of the mean over sites, from the sites' variances.", "note"))
    if groups:
        blocks.append(_told(rows, groups, "Sub-groups"))
        blocks.append(Text("Groups of few patients, and others from which these would follow, are left out.", "note"))
    blocks += _calibration(told.get("calibration", {}))
    blocks += [Text(str(note)[0].upper() + str(note)[1:] + ".", "note") for note in told.get("notes", []) if note]
    return Section("told", "What the sites computed themselves", blocks)


def _told(rows: JsonMapping, names: list[str], title: str, p_of_mean: JsonMapping | None = None) -> Table:
    cells: list[list[Any]] = []
    for name in names:
        # `change of AUC by DeLong`; a sub-group keeps the name that its site gave it
        words = name if " = " in name else " ".join(map(metric_name, name.split()))
        for site in [site for site in rows if name in rows[site]]:
            p = [] if p_of_mean is None else [p_of_mean.get(name) if site == MEAN else None]
            cells.append([words, site, *map(float, rows[site][name][:3]), *p])
    return Table(("", "site", *INTERVAL, *([] if p_of_mean is None else ["p"])), cells, title)


def _calibration(counts: JsonMapping) -> list[Block]:
    """Images of all sites by the probability of the class that was said, and how many of them were right."""
    tables = [one for one in counts.values() if one.get("bins") and one.get("right")]
    if not tables:
        return []
    bins, right = ([sum(row) for row in zip(*(one[name] for one in tables), strict=True)] for name in ("bins", "right"))
    ends = [f"{number / len(bins):.0%}" for number in range(len(bins) + 1)]
    rows = [[f"{ends[i]} to {ends[i + 1]}", images, right[i] / images if images else None]
            for i, images in enumerate(bins)]  # fmt: skip
    head = ("probability of the class that was said", "images", "share that was right")
    return [Table(head, rows, "Calibration, all sites together"), Text("Bins of few patients are empty.", "note")]


def worth_section(run: RunEvidence) -> Section | None:
    """Leave-one-out and Shapley values of each site; None where the study did not ask."""
    worth = run.result.get("worth") or {}
    if "sites" not in worth:  # FELICIA's `worth` is a list: what synthetic images brought, by round
        return None
    names = ("leave_one_out", "shapley", "low", "high")
    rows = [[site, *map(one.get, names)] for site, one in worth["sites"].items()]
    blocks: list[Block] = [
        Text(f"A model's value is {worth['value']}: {worth['all']:.4g} with all sites, {worth['none']:.4g} with none."),
        Table(("site", "without it, worse by", "Shapley value", "low", "high"), rows, "What each site adds"),
        Text(f"Shapley values add up to what training together brings ({worth['how']}).", "note"),
    ]
    return Section("worth", "What each site adds", blocks)


# --- how training went ------------------------------------------------------------------------------------


def training_section(run: RunEvidence) -> Section:
    """Validation metrics by round; what serial methods forget; how far sites' models agree."""
    scored = [line for line in run.history if line.get("validation")]
    often = "were scored once" if scored else "were not scored"
    curve: Block = Text(f"Validation images {often}: there is no curve.")
    if len(scored) > 1:
        curve = _curve(run, scored)
    return Section("course", "How training went", [curve, *_forgotten(run), *_convergence(run)])


def _curve(run: RunEvidence, lines: list[dict[str, Any]]) -> Chart:
    metric, rounds = run.metric, [line["round"] for line in lines]
    pooled = [line["validation"].get("pooled", {}).get(metric, np.nan) for line in lines]
    per_site = [line["validation"].get("per_site", {}) for line in lines]
    each = {site: [own.get(site, {}).get(metric, np.nan) for own in per_site]
            for site in run.sites if any(site in own for own in per_site)}  # fmt: skip
    rows = [[r, *map(_cell, values)] for r, *values in zip(rounds, pooled, *each.values(), strict=True)]
    released = run.result["selected"]["round"]

    def draw(axes: Any, theme: Palette) -> None:
        for i, (site, values) in enumerate(list(each.items())[:MOST_LINES]):
            axes.plot(rounds, values, label=plain(site), alpha=0.75, **theme.line(i + 1) | {"linewidth": 1.1})
        axes.plot(rounds, pooled, label=ALL, **theme.line(0) | {"linewidth": 2.6})
        if released in rounds:
            axes.axvline(released, color=theme.faint, linewidth=1, linestyle=":")
            axes.annotate("released", (released, 1), xycoords=("data", "axes fraction"), fontsize=8, color=theme.faint,
                          ha="right", va="top", rotation=90)  # fmt: skip
        axes.xaxis.get_major_locator().set_params(integer=True)
        unit = f" ({plain(run.unit)})" if run.unit and run.like == "regression" else ""
        tidy(axes, theme, x="round", y=f"validation {metric_name(metric)}{unit}")
        legend(axes, theme)

    note = f"{'Lower' if metric in LOWER else 'Higher'} is better."
    note += f" The first {MOST_LINES} of {len(each)} sites are drawn." if len(each) > MOST_LINES else ""
    table = Table(("round", ALL, *each), rows)
    return Chart("curve", f"Validation {metric_name(metric)} by round", draw, table, note)


def _cell(value: Any) -> Cell:
    return float(value) if isinstance(value, int | float) and np.isfinite(value) else None


def _forgotten(run: RunEvidence) -> list[Block]:
    """Scores of each site's images after each hand-over of a serial method (`polyclinic forgetting`)."""
    found = run.forgetting
    if found is None:
        words = "`polyclinic forgetting` on this run shows what each hand-over forgot of other sites."
        return [Text(words)] if (run.folder / "handovers").is_dir() else []
    note = "A row for each site's images; a column for the site that trained last."
    blocks: list[Block] = []
    for number, table in found["rounds"].items():
        sites = list(table)
        grid = np.array([[table[site].get(turn, np.nan) for turn in sites] for site in sites], dtype=float)
        title = f"Forgetting in round {number}: {metric_name(str(found['metric']))} of {found['split']} images"
        blocks.append(_matrix(f"forgetting-{number}", title, grid, (sites, sites), note))
    return blocks


def _convergence(run: RunEvidence) -> list[Block]:
    """Where each site has a model: each model on the images of each site."""
    across = run.result["metrics"].get("across_sites")
    if not across:
        return []
    sites = [site for site in run.sites if any(site in of_model for of_model in across.values())]
    grid = np.array([[own.get(site, {}).get(run.metric, np.nan) for site in sites] for own in across.values()])
    title = f"Each site's model on each site: {metric_name(run.metric)}"
    note = "A row for each site's model; a column for the site whose test images it judges."
    return [_matrix("convergence", title, grid, (list(across), sites), note)]


def _matrix(key: str, title: str, grid: np.ndarray, names: tuple[list[str], list[str]], note: str) -> Chart:
    """A heat map with its table; `names` are those of rows and of columns."""
    rows, columns = names
    table = Table(("", *columns), [[name, *map(_cell, row)] for name, row in zip(rows, grid, strict=True)])
    finite = grid[np.isfinite(grid)]
    limits = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)

    def draw(axes: Any, theme: Palette) -> None:
        heat_map(axes, theme, grid, names, limits)

    size = (min(6.4, 2.4 + 0.55 * len(columns)), min(6.4, 1.6 + 0.42 * len(rows)))
    return Chart(key, title, draw, table, note, size)
