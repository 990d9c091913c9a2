"""The report of a comparison: its summary and its sections."""

from __future__ import annotations

from polyclinic.attacks.verdict import LEAKS, NOT_TESTED, verdict_word
from polyclinic.files import human_bytes
from polyclinic.report.blocks import Report, number
from polyclinic.report.comparison_evidence import ComparisonEvidence, share_recovered
from polyclinic.report.sections import again, methods, sites
from polyclinic.report.sections.same_images import paired_section
from polyclinic.report.summary import warnings_of
from polyclinic.report.words import LOWER, counted, listed, metric_name, name_of_images


def report_of_comparison(found: ComparisonEvidence) -> Report:
    """Summary, the one picture, methods with intervals, tests, sites, curves, and how to run it again."""
    names = list(found.content["methods"])
    sections = [
        methods.picture(found),
        methods.side_by_side(found),
        methods.by_site(found),
        methods.curves(found),
        paired_section(found.runs, found.baseline),
    ]
    if found.first is not None:
        sections += [sites.section(found.first), again.section(found.first)]
    data = found.content.get("study", {}).get("data", {})
    source = data.get("source", "")
    images = name_of_images(data, str(source))
    title = f"{images or 'One study'}: {counted(len(names), 'method')} compared"
    subtitle = f"Comparison '{found.folder.resolve().name}' on {source}; {counted(len(found.content['rows']), 'run')}"
    kept = [one for one in sections if one is not None]
    return Report(title, subtitle, _summary(found), kept, dict(found.sources), _warnings(found))


def _warnings(found: ComparisonEvidence) -> list[str]:
    """What the runs of each method warned of, each sentence once."""
    said = {method: [one for run in runs for one in warnings_of(run)] for method, runs in found.runs.items()}
    return [f"{method}: {sentence}" for method, of_method in said.items() for sentence in dict.fromkeys(of_method)]


def _summary(found: ComparisonEvidence) -> list[str]:
    key, metric = f"test_{found.metric}", metric_name(found.metric)
    means = {method: found.spread(method, key).get("mean") for method in found.content["methods"]}
    known = {method: float(value) for method, value in means.items() if value is not None}
    runs = max((int(found.spread(method, "seconds").get("n", 1)) for method in known), default=1)
    words = [f"The comparison has {listed(list(found.content['methods']))}, each with {counted(runs, 'run')}."]
    if known:
        order = sorted(known, key=known.__getitem__, reverse=found.metric not in LOWER)
        best, worst = order[0], order[-1]
        where = "On the test images of all sites together"
        if best == worst:
            words.append(f"{where} {best} has a mean {metric} of {_value(found, best, key)}.")
        elif known[best] == known[worst]:
            words.append(f"{where} all have the same mean {metric}, {_value(found, best, key)}.")
        else:
            words.append(
                f"{where} {best} is best, with a mean {metric} of {_value(found, best, key)}; "
                f"{worst} is last, with {_value(found, worst, key)}."
            )
    bytes_of = {m: float(found.spread(m, "total_bytes")["mean"]) for m in known if found.spread(m, "total_bytes")}
    if bytes_of:
        most, least = max(bytes_of, key=bytes_of.__getitem__), min(bytes_of, key=bytes_of.__getitem__)
        rest = f" most, {human_bytes(bytes_of[most])} a run; {least} least, {human_bytes(bytes_of[least])}."
        words.append(f"{most} carried{rest if len(bytes_of) > 1 else f' {human_bytes(bytes_of[most])} a run.'}")
    return [*words, _attacked(found), _tested(found)]


def _value(found: ComparisonEvidence, method: str, key: str) -> str:
    one = found.spread(method, key)
    spread = f" ± {number(float(one['std']))}" if one.get("n", 1) > 1 else ""
    return f"{number(float(one['mean']))}{spread} {found.unit}".rstrip()


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
    """Where no attack rebuilds images: whether anything was attacked, and what leaks."""
    audits = [run.audit for runs in found.runs.values() for run in runs if run.audit is not None]
    if not audits:
        return "No run was attacked: `polyclinic audit` on a run says what an attacker could recover from what left."
    every = [(kind, verdict_word(one)) for audit in audits for kind, one in audit.get("verdicts", {}).items()]
    leaks = sorted({kind for kind, word in every if word == LEAKS})
    untested = sorted({kind for kind, word in every if word == NOT_TESTED} - {*leaks})
    said = f"leaks in {listed(leaks)}" if leaks else "nothing was shown to leak"
    said += f"; {listed(untested)}: not tested" if untested else ""
    return f"No attack that rebuilds images was run; the reports of the runs have the verdicts: {said}."


def _tested(found: ComparisonEvidence) -> str:
    tests = found.content.get("statistics") or {}
    if not tests:
        return "Each method ran once: nothing says whether the differences are more than chance. Use more seeds."
    return (
        f"Intervals are over seeds (and folds): they say how much training varies on this one test set. p is that of "
        f"the paired t test against {found.baseline}, corrected by Holm for the number of methods."
    )
