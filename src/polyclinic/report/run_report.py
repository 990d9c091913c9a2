"""The report of one run: a summary in plain sentences, and all sections that its evidence allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from polyclinic.attacks.attack import LEAKS, NOT_TESTED, WITHSTOOD, verdict_word
from polyclinic.errors import BadInput
from polyclinic.files import human_bytes
from polyclinic.json_types import JsonMapping
from polyclinic.report.blocks import Report, Section, Text
from polyclinic.report.evidence import RunEvidence, recovered
from polyclinic.report.metric_names import counted, listed, metric_name, name_of_images, with_interval, with_unit
from polyclinic.report.sections import (
    classes,
    learning_curves,
    leaving,
    masks,
    reproduce,
    scores,
    site_statistics,
    sites,
    values,
)
from polyclinic.runner.run.result_display import FEW_IMAGES, image_counts

WITHOUT_CASES = (
    "Curves, calibration and single cases need what the model says about each image, and this run kept none. Deployed "
    "runs never do: no score of a single image leaves a site. Runs of an older version did not. And there is nothing "
    "to draw where the model says what is no number."
)


def report_of_run(run: RunEvidence, by: Sequence[str] = (), prevalence: float | None = None) -> Report:
    """All sections; `by` are columns for sub-groups, `prevalence` is that of the operating points."""
    if by and run.judged is None:
        raise BadInput(f"--by {by[0]}: {run.folder} kept no predictions of single images; a deployed run keeps none")
    chosen = [
        sites.section(run),
        scores.section(run),
        site_statistics.section(run),
        site_statistics.worth_section(run),
        learning_curves.section(run),
        _by_task(run, prevalence),
        *(scores.subgroups(run, column) for column in by or _known_columns(run)),
        leaving.bytes_section(run),
        leaving.sheets_section(run),
        leaving.audit_section(run),
        leaving.privacy_section(run),
        reproduce.section(run),
    ]
    name = Path(run.folder).resolve().name
    images = name_of_images(run.study.get("data"), str(run.result["data"]["source"]))
    title = f"{images}: {run.like} with {run.result['method']}"
    subtitle = f"Run '{name}', seed {run.result['seed']}, polyclinic {run.result['environment'].get('polyclinic', '')}"
    kept = [section for section in chosen if section is not None]
    return Report(title, subtitle, summary_of(run), kept, dict(run.sources), warnings_of(run))


def _known_columns(run: RunEvidence) -> list[str]:
    """Without a choice: every column that the run kept."""
    cases = run.judged
    return [] if cases is None or cases.column_names is None else [str(name) for name in cases.column_names]


def _by_task(run: RunEvidence, prevalence: float | None) -> Section:
    if run.judged is None or not len(run.judged):
        return Section("single", "Curves and single cases", [Text(WITHOUT_CASES)])
    if run.like == "classification":
        return classes.section(run, prevalence)
    return values.section(run) if run.like == "regression" else masks.section(run)


#: what a sentence calls a kind of task
TASKS = {
    "classification": "to tell classes of images apart",
    "regression": "to predict a value from each image",
    "segmentation": "to outline what matters in each image",
}

#: sentences of a result that a report takes over; a run warns of each thing once
MOST_WARNINGS = 50


def summary_of(run: RunEvidence) -> list[str]:
    """One idea a sentence, the most important first."""
    return [*what(run), who(run), *how_good(run), *what_left(run), attacked(run), leaving.privacy_words(run)]


def warnings_of(run: RunEvidence) -> list[str]:
    """What the run warned of, as it stands in its result."""
    found = run.result.get("warnings")
    return [str(sentence) for sentence in found[:MOST_WARNINGS]] if isinstance(found, list) else []


def what(run: RunEvidence) -> list[str]:
    result = run.result
    learnt = TASKS[run.like]
    if run.classes and run.like == "classification":
        learnt += f" ({listed(run.classes)})"
    if run.unit and run.like == "regression":
        learnt = f"to predict a value in {run.unit} from each image"
    return [
        f"The study trained a model {learnt} on images of the source '{result['data']['source']}'. The method is "
        f"{result['method']}; it ran for {counted(int(result['rounds']), 'round')} with seed {result['seed']}.",
        _released(run),
    ]


def _released(run: RunEvidence) -> str:
    selected = run.result["selected"]
    model = "One model for all sites" if not run.personal else "A model of its own for each site"
    why = "the best round by validation images" if selected["by"] == "best" else "the last round"
    return f"{model} was released, from round {selected['round']} ({why})."


def who(run: RunEvidence) -> str:
    counts = run.result["data"]["counts"]
    images = sum(sum(int(n) for n in of_site.values()) for of_site in counts.values())
    taken = f" with {images:,} images in all" if images else ", whose numbers of images are their own"
    failures = run.result.get("failures") or []
    failed = f" Sites failed {counted(len(failures), 'time')} on the way." if failures else ""
    where = "Real institutions took part" if run.is_deployed else "One machine computed for all sites"
    return f"{where}: {counted(len(counts), 'site')} ({listed(list(counts))}){taken}.{failed}"


def how_good(run: RunEvidence) -> list[str]:
    metrics, pooled = run.result["metrics"], run.scores["pooled"]
    if not pooled:
        return ["The released model was not evaluated (evaluation.final is 'none')."]
    intervals = metrics.get("intervals", {}).get("pooled", {})
    names = [name for name in dict.fromkeys((run.metric, "balanced_accuracy", "auc", "rmse")) if name in pooled]
    if run.personal or not intervals:
        said = [f"{metric_name(name)} {with_unit(name, pooled[name], run.unit)}" for name in names]
    else:
        known = [name for name in names if name in intervals]
        said = [f"{metric_name(name)} {with_interval(name, intervals[name], run.unit)}" for name in known]
    basis = f"On {_judged_by(run)} of all sites together the model reaches: {'; '.join(said)}."
    return [basis, *_guessed(run), *_spread(run), *([] if intervals else [_why_no_interval(run)])]


def _guessed(run: RunEvidence) -> list[str]:
    """What somebody reaches who has seen no image, so that a reader can judge the figures."""
    guessed = run.result.get("without_images") or {}
    said = [f"{metric_name(name)} {with_unit(name, value, run.unit)}" for name, value in guessed.items()]
    guess = "the most frequent class" if run.like == "classification" else "the mean"
    return [f"Somebody who sees no image and always says {guess} reaches: {'; '.join(said)}."] if said else []


def _judged_by(run: RunEvidence) -> str:
    """`20 test images`; without the number where the sites keep it to themselves."""
    images = sum(int(of_site.get(run.split, 0)) for of_site in run.result["data"]["counts"].values())
    return counted(images, f"{run.split} image") if images else f"the {run.split} images"


def _spread(run: RunEvidence) -> list[str]:
    counts = image_counts(run.result, run.split)
    scored = {site: own for site, own in run.scores["per_site"].items() if counts.get(site, FEW_IMAGES) >= FEW_IMAGES}
    values = {site: own[run.metric] for site, own in scored.items() if run.metric in own}
    if len(values) < 2:
        return []
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    name = metric_name(run.metric)
    lowest, highest = (with_unit(run.metric, values[site], run.unit) for site in (low, high))
    if lowest == highest:
        return [f"All sites have {name} {lowest}."]
    low, high = (f"{site}, {counted(counts[site], 'image')}" if site in counts else site for site in (low, high))
    return [f"Sites differ: {name} lies between {lowest} ({low}) and {highest} ({high})."]


def _why_no_interval(run: RunEvidence) -> str:
    if mean := run.result.get("safe_statistics", {}).get("mean", {}).get(run.metric):
        entry = dict(zip(("value", "low", "high"), mean, strict=False))
        said = with_interval(run.metric, entry, run.unit)
        return f"By what the sites computed themselves, {metric_name(run.metric)} is {said} in the mean over sites."
    if run.is_deployed:
        return "There are no intervals: scores of single images stay at the sites of a deployed run."
    if run.judged is None:
        return "There are no intervals: the run kept no predictions of single images (an older version wrote it)."
    return "There are no intervals: with fewer than ten patients they would say little."


def what_left(run: RunEvidence) -> list[str]:
    total = int(run.result["communication"]["total_bytes"])
    broken = [f"The ledger of {site} does not hold: {why}." for site, why in run.ledgers.broken.items()]
    unknown = "Whether a real image left is not known: a ledger does not hold."
    if not run.ledgers.lines:
        why_none = [*broken, unknown] if broken else ["The sites' ledgers are not in this folder."]
        return [f"In all {human_bytes(total)} were carried.", *why_none]
    kinds = sorted({kind for of_site in run.ledgers.by_kind().values() for kind in of_site})
    sizes = {site: sum(of_kind.values()) for site, of_kind in run.ledgers.by_kind().items()}
    kept = unknown if broken else "No real image left a site as it is."
    raw = "Real images left a site." if "real-images" in kinds else kept
    words = (
        f"What left each site is in its ledger: {listed(kinds)}. {_most(sizes)}; "
        f"in both directions {human_bytes(total)} were carried. {raw}"
    )
    return [words, *broken]


def _most(sizes: Mapping[str, int]) -> str:
    """Who sent most; all where they sent the same."""
    most = max(sizes, key=sizes.__getitem__)
    said = {human_bytes(size) for size in sizes.values()}
    if len(sizes) > 1 and len(said) == 1:
        return f"Each site sent {human_bytes(sizes[most])}"
    return f"{most} sent {'most, ' if len(sizes) > 1 else ''}{human_bytes(sizes[most])}"


def attacked(run: RunEvidence) -> str:
    """What an attacker recovered; that nothing was tried where no audit was made."""
    if run.audit is None:
        return "What left was not attacked: `polyclinic audit` on this run says what an attacker could recover."
    verdicts = run.audit.get("verdicts", {})
    leaks, held, untested = (
        [kind for kind, one in verdicts.items() if verdict_word(one) == word] for word in (LEAKS, WITHSTOOD, NOT_TESTED)
    )
    said = []
    if leaks:
        said.append(f"leaks were found in {listed(leaks)} ({recovered_words(run.audit)})")
    if not run.audit.get("complete", True):
        untested, held = [*held, *untested], []
    if held:
        said.append(f"{listed(held)} withstood attacks that find a planted leak")
    if untested:
        said.append(f"{listed(untested)}: not tested")
    ended = "" if run.audit.get("complete", True) else " The audit was stopped before its end."
    told = "; ".join(said) or "nothing left"
    return f"What left was attacked with the budget '{run.audit.get('budget')}': {told}.{ended}"


def recovered_words(audit: JsonMapping) -> str:
    found = recovered(audit)
    if found is None:
        return "no attack on it rebuilds images"
    count, images = found
    return f"{count} of {counted(images, 'attacked image')} recovered by the strongest attack"
