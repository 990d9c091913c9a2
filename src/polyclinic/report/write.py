"""Write the report of a run or a comparison: one HTML file that opens offline, and a PDF.

`evidence` reads a folder as data; `sections/` make sentences, charts and tables of it (`blocks`); `html` and `pdf`
write them. Nothing of a study is run, so that a folder from somebody else can be looked at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polyclinic.errors import BadInput
from polyclinic.files import atomic_write
from polyclinic.report.blocks import Report
from polyclinic.report.comparison import report_of_comparison
from polyclinic.report.evidence import COMPARISON, open_comparison, open_run
from polyclinic.report.html import html_of
from polyclinic.report.pdf import pdf_of
from polyclinic.report.run_report import report_of_run


@dataclass(frozen=True)
class Written:
    """The files that were written."""

    html: Path
    pdf: Path | None = None


def build_report(
    folder: Path, *, by: Sequence[str] = (), prevalence: float | None = None, images: bool = True
) -> Report:
    """The report of a run folder, or of a comparison's."""
    if not folder.is_dir():
        raise BadInput(f"{folder}: there is no such folder; name that of a run or of a comparison")
    if prevalence is not None and not 0 < prevalence < 1:
        raise BadInput(f"--prevalence {prevalence}: choose a share between 0 and 1, such as 0.02 for 2 of 100 patients")
    with _damage_said(folder):
        if (folder / COMPARISON).is_file():
            if by or prevalence is not None:
                raise BadInput("--by and --prevalence are for the report of one run; name the folder of a run")
            return report_of_comparison(open_comparison(folder, images=images))
        return report_of_run(open_run(folder, images=images), by, prevalence)


@contextlib.contextmanager
def _damage_said(folder: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        # files of somebody else may have any shape: a sentence then, and the place with POLYCLINIC_TRACEBACK
        raise BadInput(f"{folder}: a file of it is damaged or was changed ({error!r}); fetch it again") from error


def write_report(
    folder: str | Path,
    *,
    out: Path | None = None,
    pdf: bool = False,
    by: Sequence[str] = (),
    prevalence: float | None = None,
    images: bool = True,
    title: str = "",
) -> Written:
    """Write `report.html` (and `report.pdf`) into a run folder or a comparison's, or to `out`."""
    report = build_report(Path(folder), by=by, prevalence=prevalence, images=images)
    report = replace(report, title=" ".join(title.split()) or report.title)
    file = out or Path(folder) / "report.html"
    with _damage_said(Path(folder)):  # charts are drawn here; both pages before either is written
        page, paper = html_of(report), pdf_of(report) if pdf else None
    try:
        atomic_write(file, page)
        if paper is None:
            return Written(file)
        atomic_write(file.with_suffix(".pdf"), paper)
    except OSError as error:
        raise BadInput(f"{file}: cannot be written ({error.strerror}); name another place with --out") from None
    return Written(file, file.with_suffix(".pdf"))
