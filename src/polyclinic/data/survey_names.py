"""Sites out of the names of files, by a regular expression of whoever knows how they are named."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from polyclinic.data.datasets.folder import images_below, part_of_name
from polyclinic.data.names import safe_name
from polyclinic.data.survey_result import Survey
from polyclinic.errors import BadInput


def sites_by_name(found: Survey, pattern: str) -> Survey:
    """What was found, with the sites that the pattern finds in the names of its image files."""
    if found.cases is not None:
        files = found.cases.files()
    elif found.source == "folder":
        files = images_below(found.path)
    else:
        raise BadInput(f"--site: takes sites out of names of files; {found.path} can name them itself, as site")
    try:
        sites = [safe_name(part_of_name(file.name, pattern, "site")) for file in files]
    except BadInput as error:
        raise BadInput(str(error).replace("data.site", "--site", 1)) from None
    counts = dict(sorted(Counter(sites).items()))
    if found.cases is None:
        return replace(found, sites=counts, site_pattern=pattern)
    rows = [{**row, "site": site} for row, site in zip(found.cases.rows, sites, strict=True)]
    return replace(found, sites=counts, cases=replace(found.cases, rows=rows, fields=tuple(rows[0])))
