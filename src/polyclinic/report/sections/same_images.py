"""Methods compared on the very same images: DeLong's test of their AUCs, McNemar's test of their errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from polyclinic.errors import BadInput
from polyclinic.metrics.statistics import delong_test, holm, mcnemar
from polyclinic.report.blocks import Section, Table, Text
from polyclinic.report.evidence import RunEvidence
from polyclinic.runner.case_statistics import scores_of
from polyclinic.runner.cases import Cases

LIMITS = (
    "Both tests take the first run of each method and count every image as independent; with several images of a "
    "patient, p is too small. They compare two models, not two methods: another seed gives another model. p is "
    "corrected by Holm over the methods."
)


def paired_section(runs: Mapping[str, Sequence[RunEvidence]], baseline: str) -> Section | None:
    """Each method's first run against the baseline's, where both kept what they say about the same images."""
    firsts = {method: some[0].cases for method, some in runs.items() if some and some[0].cases is not None}
    reference = firsts.get(baseline)
    if reference is None or reference.like != "classification":
        return None
    others = {method: cases for method, cases in firsts.items() if method != baseline and _same(cases, reference)}
    found = {method: _tests(cases, reference) for method, cases in others.items()}
    if not found:
        return None
    corrected = [_holm([tests[place] for tests in found.values()]) for place in (1, 2)]
    rows = [[method, tests[0], *(p[i] for p in corrected)] for i, (method, tests) in enumerate(found.items())]
    columns = ("method", f"AUC minus that of {baseline}", "p (DeLong, Holm)", "p (McNemar, Holm)")
    table = Table(columns, rows, f"On the same test images as {baseline}")
    return Section("paired", "The same images, two models", [table, Text(LIMITS, "note")])


def _same(a: Cases | None, b: Cases) -> bool:
    """Whether both are about the same images in the same order, as far as labels, sites and patients tell."""
    if a is None or a.like != b.like or len(a) != len(b) or a.sites.tolist() != b.sites.tolist():
        return False
    pairs = [(a.labels, b.labels), (a.site, b.site)]
    if a.patients is not None and b.patients is not None:
        pairs.append((a.patients, b.patients))
    return all(np.array_equal(one, other) for one, other in pairs)


def _tests(cases: Cases, reference: Cases) -> tuple[float | None, float | None, float | None]:
    """The difference of AUCs with DeLong's p (two classes only), and McNemar's p."""
    assert cases.predictions is not None
    assert reference.predictions is not None
    right = [one.predictions.argmax(1) == one.labels for one in (cases, reference)]  # type: ignore[union-attr]
    p_errors = mcnemar(right[0], right[1])
    if cases.predictions.shape[1] != 2:
        return None, None, p_errors
    try:
        found = delong_test(scores_of(cases)[:, 1], scores_of(reference)[:, 1], cases.labels)
    except BadInput:
        return None, None, p_errors
    return found.difference, found.p, p_errors


def _holm(values: Sequence[float | None]) -> list[float | None]:
    """Corrected p values; where there is none, none."""
    known = iter(holm([value for value in values if value is not None]))
    return [None if value is None else next(known) for value in values]
