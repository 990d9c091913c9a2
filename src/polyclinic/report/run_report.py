"""The report of one run: a summary in plain sentences, and all sections that its evidence allows."""

from collections.abc import Sequence

from polyclinic.attacks.attack import LEAKS, NOT_TESTED, WITHSTOOD, verdict_word
from polyclinic.errors import BadInput
from polyclinic.files import human_bytes
from polyclinic.json_types import JsonMapping
from polyclinic.report import blocks, sites
from polyclinic.report.blocks import Report, Section, Text, counted, listed, metric_name, with_unit
from polyclinic.report.classification import classes_section
from polyclinic.report.evidence import RunEvidence
from polyclinic.report.predictions import masks_section, values_section
from polyclinic.report.scores import scores_section, site_statistics, subgroups, training_section, worth_section
from polyclinic.runner.evaluate.rounded_scores import in_words
from polyclinic.runner.run.result_display import FEW_IMAGES, image_counts

WITHOUT_CASES = (
    "Curves, calibration and single cases need what the model says about each image, and this run kept none. Deployed "
    "runs never do: no score of a single image leaves a site. Runs of an older version did not. And there is nothing "
    "to draw where the model says what is no number."
)


def report_of_run(run: RunEvidence, by: Sequence[str] = (), prevalence: float | None = None) -> Report:
    """All sections; `by` are columns for sub-groups, `prevalence` is that of the operating points."""
    cases = run.judged
    if by and cases is None:
        raise BadInput(f"--by {by[0]}: {run.folder} kept no predictions of single images; a deployed run keeps none")
    kept = [] if cases is None or cases.column_names is None else [str(name) for name in cases.column_names]
    if cases is None or not len(cases):
        by_task = Section("single", "Curves and single cases", [Text(WITHOUT_CASES)])
    elif run.like == "classification":
        by_task = classes_section(run, cases, prevalence)
    else:
        by_task = values_section(run, cases) if run.like == "regression" else masks_section(run, cases)
    sections = [
        sites.sites_section(run),
        scores_section(run),
        site_statistics(run),
        worth_section(run),
        training_section(run),
        by_task,
        *(subgroups(run, column) for column in by or kept),
        sites.bytes_section(run),
        sites.sheets_section(run),
        sites.audit_section(run),
        sites.privacy_section(run),
        sites.reproduce_section(run),
    ]
    images = blocks.name_of_images(run.study.get("data"), str(run.result["data"]["source"]))
    title = f"{images}: {run.like} with {run.result['method']}"
    version = run.result["environment"].get("polyclinic", "")
    subtitle = f"Run '{run.folder.resolve().name}', seed {run.result['seed']}, polyclinic {version}"
    there = [section for section in sections if section is not None]
    return Report(title, subtitle, summary_of(run), there, warnings_of(run))


#: the words of a sentence for a kind of task
TASKS = {
    "classification": "to tell classes of images apart",
    "regression": "to predict a value from each image",
    "segmentation": "to outline what matters in each image",
}

#: sentences of a result that a report takes over; a run warns of each thing once
MOST_WARNINGS = 50


def summary_of(run: RunEvidence) -> list[str]:
    """One idea a sentence, the most important first."""
    return [*_what(run), *_how_good(run), *_what_left(run), _attacked(run), sites.privacy_words(run)]


def warnings_of(run: RunEvidence) -> list[str]:
    """Warnings of the run, as they stand in its result."""
    found = run.result.get("warnings")
    return [str(sentence) for sentence in found[:MOST_WARNINGS]] if isinstance(found, list) else []


def _what(run: RunEvidence) -> list[str]:
    result, selected = run.result, run.result["selected"]
    learnt = TASKS[run.like]
    if run.classes and run.like == "classification":
        learnt += f" ({listed(run.classes)})"
    if run.unit and run.like == "regression":
        learnt = f"to predict a value in {run.unit} from each image"
    model = "One model for all sites" if not run.personal else "A model of its own for each site"
    why = "the best round by validation images" if selected["by"] == "best" else "the last round"
    counts, failures = result["data"]["counts"], result.get("failures") or []
    images = sum(sum(int(n) for n in of_site.values()) for of_site in counts.values())
    taken = f" with {images:,} images in all" if images else ", whose numbers of images are their own"
    failed = f" Sites failed {counted(len(failures), 'time')} on the way." if failures else ""
    where = "Real institutions took part" if run.is_deployed else "One machine computed for all sites"
    return [
        f"The study trained a model {learnt} on images of the source '{result['data']['source']}'. The method is "
        f"{result['method']}; it ran for {counted(int(result['rounds']), 'round')} with seed {result['seed']}.",
        f"{model} was released, from round {selected['round']} ({why}).",
        f"{where}: {counted(len(counts), 'site')} ({listed(list(counts))}){taken}.{failed}",
    ]


def _how_good(run: RunEvidence) -> list[str]:
    pooled, intervals = run.scores["pooled"], run.result["metrics"].get("intervals", {}).get("pooled", {})
    if not pooled:
        return ["The released model was not evaluated (evaluation.final is 'none')."]
    names = [name for name in dict.fromkeys((run.metric, "balanced_accuracy", "auc", "rmse")) if name in pooled]
    if rounded := run.result["metrics"].get("rounding", {}).get("pooled"):
        said = "; ".join(f"{metric_name(name)} {in_words(rounded, name)}" for name in names if name in rounded)
    elif run.personal or not intervals:
        said = _said({name: pooled[name] for name in names}, run)
    else:
        known = [name for name in names if name in intervals]
        found = {name: blocks.with_interval(name, intervals[name], run.unit) for name in known}
        said = "; ".join(f"{metric_name(name)} {words}" for name, words in found.items())
    # the number of images is left out where the sites keep it to themselves
    images = sum(int(of_site.get(run.split, 0)) for of_site in run.result["data"]["counts"].values())
    judged_by = counted(images, f"{run.split} image") if images else f"the {run.split} images"
    words = [f"On {judged_by} of all sites together the model reaches: {said}."]
    if guessed := _said(run.result.get("without_images") or {}, run):  # so that a reader can judge the figures
        guess = "the most frequent class" if run.like == "classification" else "the mean"
        words.append(f"Somebody who sees no image and always says {guess} reaches: {guessed}.")
    return [*words, *_spread(run), *([] if intervals else [_why_no_interval(run)])]


def _said(values: JsonMapping, run: RunEvidence) -> str:
    return "; ".join(f"{metric_name(name)} {with_unit(name, value, run.unit)}" for name, value in values.items())


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
        said = blocks.with_interval(run.metric, entry, run.unit)
        return f"By what the sites computed themselves, {metric_name(run.metric)} is {said} in the mean over sites."
    if run.is_deployed:
        return "There are no intervals: scores of single images stay at the sites of a deployed run."
    if run.judged is None:
        return "There are no intervals: the run kept no predictions of single images (an older version wrote it)."
    return "There are no intervals: with fewer than ten patients they would say little."


def _what_left(run: RunEvidence) -> list[str]:
    total = human_bytes(int(run.result["communication"]["total_bytes"]))
    broken = [f"The ledger of {site} does not hold: {why}." for site, why in run.ledgers.broken.items()]
    unknown = "Whether a real image left is not known: a ledger does not hold."
    by_kind = run.ledgers.by_kind()
    if not by_kind:
        why_none = [*broken, unknown] if broken else ["The sites' ledgers are not in this folder."]
        return [f"In all {total} were carried.", *why_none]
    kinds = sorted({kind for of_site in by_kind.values() for kind in of_site})
    sizes = {site: sum(of_kind.values()) for site, of_kind in by_kind.items()}
    kept = unknown if broken else "No real image left a site as it is."
    raw = "Real images left a site." if "real-images" in kinds else kept
    most = max(sizes, key=sizes.__getitem__)
    alike = len(sizes) > 1 and len({human_bytes(size) for size in sizes.values()}) == 1
    who = "Each site sent" if alike else f"{most} sent {'most,' if len(sizes) > 1 else ''}".rstrip()
    words = (
        f"What left each site is in its ledger: {listed(kinds)}. {who} {human_bytes(sizes[most])}; "
        f"in both directions {total} were carried. {raw}"
    )
    return [words, *broken]


def _attacked(run: RunEvidence) -> str:
    """A sentence about what an attacker recovered, or that nothing was tried where no audit was made."""
    if run.audit is None:
        return "What left was not attacked: `polyclinic audit` on this run says what an attacker could recover."
    verdicts = run.audit.get("verdicts", {})
    leaks, held, untested = (
        [kind for kind, one in verdicts.items() if verdict_word(one) == word] for word in (LEAKS, WITHSTOOD, NOT_TESTED)
    )
    whole, said = run.audit.get("complete", True), []
    if not whole:
        untested, held = [*held, *untested], []
    if leaks:
        found = sites.recovered(run.audit)
        how = "no attack on it rebuilds images"
        if found is not None:
            how = f"{found[0]} of {counted(found[1], 'attacked image')} recovered by the strongest attack"
        said.append(f"leaks were found in {listed(leaks)} ({how})")
    if held:
        said.append(f"{listed(held)} withstood attacks that find a planted leak")
    if untested:
        said.append(f"{listed(untested)}: not tested")
    ended = "" if whole else " The audit was stopped before its end."
    words = "; ".join(said) or "nothing left"
    return f"What left was attacked with the budget '{run.audit.get('budget')}': {words}.{ended}"
