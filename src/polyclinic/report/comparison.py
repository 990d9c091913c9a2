"""The report of a comparison: summary, methods side by side in pictures and tables, and tests on the same images."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polyclinic.attacks.attack import LEAKS, NOT_TESTED, verdict_word
from polyclinic.errors import BadInput
from polyclinic.files import human_bytes
from polyclinic.metrics.statistics import delong_test, holm, mcnemar
from polyclinic.palette import Palette, legend, plain, tidy
from polyclinic.report import blocks
from polyclinic.report.blocks import (
    LOWER,
    Block,
    Cell,
    Chart,
    Report,
    Section,
    Table,
    Text,
    listed,
    mean_of,
    metric_name,
)
from polyclinic.report.evidence import ComparisonEvidence, RunEvidence
from polyclinic.report.run_report import warnings_of
from polyclinic.report.scores import forest
from polyclinic.report.sites import recovered, reproduce_section, sites_section
from polyclinic.runner.evaluate.case_scores import Cases
from polyclinic.runner.evaluate.case_statistics import scores_of

CEILING = "centralized has all images in one place; a ceiling only if its settings were searched (compare --tuned)."


def report_of_comparison(found: ComparisonEvidence) -> Report:
    """Summary, the one picture, methods with intervals, tests, sites, curves, and how to run it again."""
    sections = [picture(found), side_by_side(found), by_site(found), curves(found), paired_section(found)]
    if found.first is not None:
        sections += [sites_section(found.first), reproduce_section(found.first)]
    data = found.content.get("study", {}).get("data", {})
    source = data.get("source", "")
    images = blocks.name_of_images(data, str(source)) or "One study"
    title = f"{images}: {blocks.counted(len(found.content['methods']), 'method')} compared"
    runs = blocks.counted(len(found.content["rows"]), "run")
    subtitle = f"Comparison '{found.folder.resolve().name}' on {source}; {runs}"
    kept = [one for one in sections if one is not None]
    return Report(title, subtitle, _summary(found), kept, _warnings(found))


def _warnings(found: ComparisonEvidence) -> list[str]:
    """Each sentence once, behind the methods that said it; of those that differ in figures only, the first."""
    said: dict[str, str] = {}
    of: dict[str, dict[str, None]] = {}
    for method, runs in found.runs.items():
        for sentence in (one for run in runs for one in warnings_of(run)):
            key = re.sub(r"\d[\d.,]*", "#", sentence)
            said.setdefault(key, sentence)
            of.setdefault(key, {})[method] = None
    return [f"{listed(list(of[key]))}: {sentence}" for key, sentence in said.items()]


def _summary(found: ComparisonEvidence) -> list[str]:
    key, metric = f"test_{found.metric}", mean_of(found.metric)
    means = {method: found.spread(method, key).get("mean") for method in found.content["methods"]}
    known = {method: float(value) for method, value in means.items() if value is not None}
    runs = max((int(found.spread(method, "seconds").get("n", 1)) for method in known), default=1)
    words = [f"The comparison has {listed(list(found.content['methods']))}, each with {blocks.counted(runs, 'run')}."]
    if known:
        order = sorted(known, key=known.__getitem__, reverse=found.metric not in LOWER)
        best, worst = order[0], order[-1]
        where = "On the test images of all sites together"
        if best == worst:
            words.append(f"{where} {best} has a {metric} of {_value(found, best, key)}.")
        elif known[best] == known[worst]:
            words.append(f"{where} all have the same {metric}, {_value(found, best, key)}.")
        else:
            words.append(
                f"{where} {best} is best, with a {metric} of {_value(found, best, key)}; "
                f"{worst} is last, with {_value(found, worst, key)}."
            )
    bytes_of = {m: float(found.spread(m, "total_bytes")["mean"]) for m in known if found.spread(m, "total_bytes")}
    if bytes_of:
        most, least = max(bytes_of, key=bytes_of.__getitem__), min(bytes_of, key=bytes_of.__getitem__)
        much, little = human_bytes(bytes_of[most]), human_bytes(bytes_of[least])
        several = f"{most} carried most, {much} a run; {least} least, {little}."
        words.append(several if len(bytes_of) > 1 else f"{most} carried {much} a run.")
    if "centralized" in known:
        words.append(CEILING)
    tested = "Each method ran once: nothing says whether the differences are more than chance. Use more seeds."
    if found.content.get("statistics"):
        tested = (
            "Intervals are over seeds (and folds): they say how much training varies on this one test set. p is that "
            f"of the paired t test against {found.baseline}, corrected by Holm for the number of methods."
        )
    return [*words, _attacked(found), tested]


def _value(found: ComparisonEvidence, method: str, key: str) -> str:
    return f"{_spread(found.spread(method, key))} {found.unit}".rstrip()


def _spread(one: Mapping[str, float]) -> str:
    mean = blocks.number(float(one["mean"]))
    digits = 1 if "e" in mean else len(mean.partition(".")[2])  # the deviation has as many as its mean
    return mean + (f" ± {float(one['std']):,.{digits}{'e' * ('e' in mean) or 'f'}}" if one.get("n", 1) > 1 else "")


def share_recovered(runs: Sequence[RunEvidence]) -> float | None:
    """The largest share of attacked images that an attack recovered in any run; None where no attack rebuilt images.

    Where real images left as they are, nothing has to be attacked: all of them are recovered.
    """
    if any("real-images" in kinds for run in runs for kinds in run.ledgers.by_kind().values()):
        return 1.0
    found = [one for run in runs if run.audit is not None and (one := recovered(run.audit)) is not None]
    return max(count / max(1, images) for count, images in found) if found else None


def _attacked(found: ComparisonEvidence) -> str:
    shares = {method: share_recovered(runs) for method, runs in found.runs.items()}
    known = {method: share for method, share in shares.items() if share is not None}
    if not known:
        return _verdicts(found)
    said = [f"{share:.0%} of {method}'s" for method, share in known.items()]
    missing = [method for method in shares if method not in known]
    rest = f" {listed(missing)} had no attack that rebuilds images." if missing else ""
    return f"The strongest attack recovered {listed(said)} attacked images.{rest}"


def _verdicts(found: ComparisonEvidence) -> str:
    """Verdicts of the runs, where no attack rebuilds images."""
    audits = [run.audit for runs in found.runs.values() for run in runs if run.audit is not None]
    if not audits:
        return "No run was attacked: `polyclinic audit` on a run says what an attacker could recover from what left."
    every = [(kind, verdict_word(one)) for audit in audits for kind, one in audit.get("verdicts", {}).items()]
    leaks = sorted({kind for kind, word in every if word == LEAKS})
    untested = sorted({kind for kind, word in every if word == NOT_TESTED} - {*leaks})
    said = f"leaks in {listed(leaks)}" if leaks else "nothing was shown to leak"
    said += f"; {listed(untested)}: not tested" if untested else ""
    return f"No attack that rebuilds images was run; the reports of the runs have the verdicts: {said}."


def picture(found: ComparisonEvidence) -> Section:
    key, rows = f"test_{found.metric}", []
    for method in found.content["methods"]:
        value, size = found.spread(method, key).get("mean"), found.spread(method, "total_bytes").get("mean")
        if value is not None and size is not None:
            rows.append((method, float(value), float(size), share_recovered(found.runs.get(method, []))))
    title = "Error, recovered images and bytes"
    if not rows:
        return Section("picture", title, [Text("No run has been tested: there is nothing to draw.")])
    table = Table(("method", metric_name(found.metric), "bytes carried", "share of attacked images recovered"),
                  [[m, v, s, r] for m, v, s, r in rows])  # fmt: skip
    note = (
        f"{'Lower' if found.metric in LOWER else 'Higher'} is better; fewer bytes are to the left. The larger a point, "
        "the more images an attacker recovered; green: none. A hollow point: no attack that rebuilds images was run."
    )

    def draw(axes: Any, theme: Palette) -> None:
        sizes = np.array([max(1.0, size) for _, _, size, _ in rows])
        axes.set_xscale("log")
        axes.set_xlim(min(sizes.min() / 3, sizes.max() / 30), max(sizes.max() * 6, sizes.min() * 60))
        words: dict[str, str] = {}
        for i, (method, value, _, share) in enumerate(rows):
            area, colour = 60 + 520 * (share or 0), theme.colour(2) if share == 0 else theme.colour(1)
            face = {"facecolors": "none"} if share is None else {"color": colour, "alpha": 0.85}
            axes.scatter([sizes[i]], [value], s=area, marker="o", edgecolors=theme.ink, linewidths=1.2, **face)
            words[method] = plain(method) + (" (not attacked)" if share is None else f" ({share:.0%})")
        # bytes in words: no powers of ten, and none of matplotlib's formulas
        axes.xaxis.set_major_formatter(lambda value, _: human_bytes(value))
        axes.xaxis.set_minor_formatter(lambda *_: "")
        axes.margins(y=0.2)
        name_points(axes, theme, {words[method]: (size, value) for method, value, size, _ in rows})
        unit, better = f" ({plain(found.unit)})" if found.unit else "", "lower" if found.metric in LOWER else "higher"
        tidy(axes, theme, x="carried in a run", y=f"test {metric_name(found.metric)}{unit}, {better} is better")

    words = f"{metric_name(found.metric)} against bytes, and what was recovered"
    chart = Chart("picture", words[:1].upper() + words[1:], draw, table, note, (7.2, 4.6))
    return Section("picture", title, [chart])


RADIUS = 13  #: of the largest point, in points of the drawing


def name_points(axes: Any, theme: Palette, points: Mapping[str, tuple[float, float]]) -> None:
    """Write the name of each point beside it, higher or lower where another name or point is; a thin line joins what
    is far apart. Places are in points (1/72 inch) of the drawing, of which the axes take most."""
    from matplotlib.textpath import TextPath

    wide, high = axes.figure.get_size_inches() * 72 * (0.8, 0.75)
    line = 12.0
    (left, right), (low, top) = (np.log10(axes.get_xlim()), axes.get_ylim())

    def place(size: float, value: float) -> tuple[float, float]:
        return wide * (np.log10(max(1.0, size)) - left) / (right - left), high * (value - low) / (top - low)

    taken = [(x - RADIUS, x + RADIUS, y) for x, y in (place(*point) for point in points.values())]
    for name, (size, value) in sorted(points.items(), key=lambda one: one[1][1]):
        x, y = place(size, value)
        length = TextPath((0, 0), name, size=8.5).get_extents().width + 6
        shift = 14 if x + 14 + length < wide else -14 - length
        start = x + shift
        for step in sorted(range(-20, 21), key=abs):
            at = y + step * line
            free = all(abs(at - other) >= line or start > e or start + length < s for s, e, other in taken)
            if free and -line < at < high + line:
                break
        taken.append((start, start + length, at))
        look = {"arrowstyle": "-", "color": theme.faint, "linewidth": 0.6, "relpos": (float(shift < 0), 0.5)}
        join = {"arrowprops": look} if abs(step) > 1 else {}
        axes.annotate(name, (max(1.0, size), value), xytext=(shift, step * line - 3), textcoords="offset points",
                      fontsize=8.5, color=theme.ink, **join)  # fmt: skip


OWN = (
    "'own site' is the mean over sites, each on its own images; where a site has a model of its own, by that model. "
    "All other columns are of the images of all sites, there the mean over the models."
)


def models_of_sites(found: ComparisonEvidence) -> set[str]:
    """The methods that end with a model for each site."""
    return {name for name, runs in found.runs.items() if any("models_judged" in run.result["metrics"] for run in runs)}


def _own(found: ComparisonEvidence, method: str) -> str:
    """The name of a method where each image is judged by the model of its own site, if sites have one."""
    return f"{method} (own site)" if method in models_of_sites(found) else method


def side_by_side(found: ComparisonEvidence) -> Section:
    names = [n for n in next(iter(found.content["methods"].values())) if n.startswith("test_")]
    own, guessed = f"mean_{found.metric}", found.content.get("without_images") or {}
    statistics = found.content.get("statistics") or {}
    key = f"test_{found.metric}"
    rows: list[list[Cell]] = []
    intervals = {}
    for method in found.content["methods"]:
        entry = statistics.get(method, {}).get(key, {})
        test = entry.get("against_baseline") or {}
        p = test.get("p_holm")
        spread = [_spread(one) if (one := found.spread(method, name)) else None for name in names]
        interval = f"{blocks.number(float(entry['low']))} to {blocks.number(float(entry['high']))}" if entry else None
        at_home = _spread(one) if (one := found.spread(method, own)) else None
        rows.append([method, *spread, at_home, interval, None if p is None else float(p)])
        if entry:
            mean = float(found.spread(method, key)["mean"])
            intervals[method] = {"value": mean, "low": float(entry["low"]), "high": float(entry["high"])}
    if guessed:
        scores = [guessed.get(name.removeprefix("test_")) for name in names]
        cells = [None if one is None else blocks.number(float(one)) for one in scores]
        rows.append(["a guess without images", *cells, None, None, None])
    columns = ("method", *(metric_name(name.removeprefix("test_")) for name in names),
               f"{metric_name(found.metric)}, own site", "95 % interval of the mean",
               f"p against {found.baseline}")  # fmt: skip
    title = "Mean ± standard deviation over runs, test images of all sites together"
    made: list[Block] = [Table(columns, rows, title), Text(OWN, "note")]
    if intervals:
        words = mean_of(found.metric)
        title = f"{words[:1].upper()}{words[1:]} of each method"
        made.append(forest("methods", title, intervals, found.metric, found.unit, "95 % interval over runs."))
    return Section("methods", "Methods side by side", made)


def by_site(found: ComparisonEvidence) -> Section | None:
    """Each method at each site, the mean over its runs."""
    names = dict.fromkeys(site for runs in found.runs.values() for run in runs for site in run.scores["per_site"])
    rows: list[list[Cell]] = []
    for method, runs in found.runs.items():
        own = {site: [run.scores["per_site"].get(site, {}).get(found.metric, np.nan) for run in runs] for site in names}
        finite = [[float(value) for value in values if value == value] for values in own.values()]
        if runs:
            rows.append([_own(found, method), *(sum(values) / len(values) if values else None for values in finite)])
    name = metric_name(found.metric)
    words = f"{name[:1].upper()}{name[1:]} of each method at each site, the mean over its runs"
    return Section("by-site", "Methods by site", [Table(("method", *names), rows, words)]) if names and rows else None


def curves(found: ComparisonEvidence) -> Section | None:
    """Validation metric by round, the first run of each method."""
    lines_of = {}
    for method, runs in found.runs.items():
        lines = [line for line in runs[0].history if line.get("validation")] if runs else []
        points = [(line["round"], line["validation"].get("pooled", {}).get(found.metric)) for line in lines]
        if known := [(r, float(v)) for r, v in points if isinstance(v, int | float)]:
            lines_of[_own(found, method)] = known
    if not lines_of:
        return None
    rows = [[method, r, v] for method, points in lines_of.items() for r, v in points]

    def draw(axes: Any, theme: Palette) -> None:
        for i, (method, points) in enumerate(lines_of.items()):
            look = {"marker": theme.marker(i), "markersize": 3, **theme.line(i)}
            axes.plot(*zip(*points, strict=True), label=plain(method), **look)
        axes.xaxis.get_major_locator().set_params(integer=True)
        tidy(axes, theme, x="round", y=f"validation {metric_name(found.metric)}")
        legend(axes, theme)

    table = Table(("method", "round", metric_name(found.metric)), rows)
    note = "The first run of each method. 'own site': each site's own model, on its own images."
    chart = Chart("curves", "Validation scores by round", draw, table, note)
    return Section("course", "How training went", [chart])


LIMITS = (
    "Both tests take the first run of each method and count every image as independent; with several images of a "
    "patient, p is too small. They compare two models, not two methods: another seed gives another model. p is "
    "corrected by Holm over the methods. 'own site': each image is judged by the model of its own site."
)


def paired_section(comparison: ComparisonEvidence) -> Section | None:
    """Each method's first run against the baseline's, where both kept what they say about the same images."""
    baseline = comparison.baseline
    firsts = {method: runs[0].cases for method, runs in comparison.runs.items() if runs and runs[0].cases is not None}
    reference = firsts.get(baseline)
    if reference is None or reference.like != "classification":
        return None
    others = {method: cases for method, cases in firsts.items() if method != baseline}
    found = {method: _tests(cases, reference) for method, cases in others.items() if _same(cases, reference)}
    if not found:
        return None
    corrected: list[list[float | None]] = []  # p values; where there is none, none
    for values in zip(*(tests[1:] for tests in found.values()), strict=True):
        known = iter(holm([value for value in values if value is not None]))
        corrected.append([None if value is None else next(known) for value in values])
    named = [_own(comparison, method) for method in found]
    rows = [[named[i], tests[0], *(p[i] for p in corrected)] for i, tests in enumerate(found.values())]
    reference_name = _own(comparison, baseline)
    columns = ("method", f"AUC minus that of {reference_name}", "p (DeLong, Holm)", "p (McNemar, Holm)")
    table = Table(columns, rows, f"On the same test images as {reference_name}")
    return Section("paired", "The same images, two models", [table, Text(LIMITS, "note")])


def _same(a: Cases, b: Cases) -> bool:
    """True where both are about the same images in the same order, as far as labels, sites and patients tell."""
    if a.like != b.like or len(a) != len(b) or a.sites.tolist() != b.sites.tolist():
        return False
    pairs = [(a.labels, b.labels), (a.site, b.site)]
    if a.patients is not None and b.patients is not None:
        pairs.append((a.patients, b.patients))
    return all(np.array_equal(one, other) for one, other in pairs)


def _tests(cases: Cases, reference: Cases) -> tuple[float | None, float | None, float | None]:
    """The difference of AUCs with DeLong's p (two classes only), and McNemar's p."""
    assert cases.predictions is not None
    assert reference.predictions is not None
    p_errors = mcnemar(cases.predictions.argmax(1) == cases.labels, reference.predictions.argmax(1) == reference.labels)
    if cases.predictions.shape[1] == 2:
        with contextlib.suppress(BadInput):  # one positive or negative image only
            found = delong_test(scores_of(cases)[:, 1], scores_of(reference)[:, 1], cases.labels)
            return found.difference, found.p, p_errors
    return None, None, p_errors
