"""Sites and patients out of the names of files, by a regular expression of whoever knows how they are named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from polyclinic.data.allowed_paths import safe_name
from polyclinic.data.datasets.folder import images_below, part_of_name
from polyclinic.data.survey_result import Survey
from polyclinic.errors import BadInput

What = Literal["site", "patient"]


def sites_by_name(found: Survey, pattern: str) -> Survey:
    """What was found, with the sites that the pattern finds in the names of its image files."""
    sites = [safe_name(name) for name in _parts(found, pattern, "site")]
    counts = dict(sorted(Counter(sites).items()))
    return replace(_with_column(found, "site", sites, pattern), sites=counts)


def patients_by_name(found: Survey, pattern: str) -> Survey:
    """What was found, with the patients that the pattern finds in the names of its image files."""
    patients = _parts(found, pattern, "patient")
    return replace(_with_column(found, "patient", patients, pattern), patients=len(set(patients)))


def _parts(found: Survey, pattern: str, what: What) -> list[str]:
    """What the pattern finds in each name; in each path below the folder of the table, where names do not have it."""
    cases = found.cases or found.table
    if cases is None and found.source != "folder":
        raise BadInput(f"--{what}: takes it out of names of files; {found.path} has none: name an array {what} in it")
    names = [file.name for file in (cases.files() if cases else images_below(found.path))]
    try:
        return _searched(names, pattern, what)
    except BadInput as error:
        if cases is not None and "finds no" in str(error):
            try:
                return _searched([row["path"] for row in cases.rows], pattern, what)
            except BadInput:
                pass
        raise BadInput(str(error).replace(f"data.{what}", f"--{what}", 1)) from None


def _searched(names: Sequence[str], pattern: str, what: What) -> list[str]:
    return [part_of_name(name, pattern, what) for name in names]


def _with_column(found: Survey, what: What, values: Sequence[str], pattern: str) -> Survey:
    """With the values as a column of the cases; with the pattern itself, where a study reads the folder."""
    cases = found.cases or found.table
    if cases is None:
        return replace(found, site_pattern=pattern) if what == "site" else replace(found, patient_pattern=pattern)
    rows = [{**row, what: value} for row, value in zip(cases.rows, values, strict=True)]
    return replace(found, cases=replace(cases, rows=rows, fields=tuple(rows[0]), is_new=True))
