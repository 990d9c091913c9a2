"""The report of one run: its summary and all sections that its evidence allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polyclinic.errors import BadInput
from polyclinic.report.blocks import Report, Section, Text
from polyclinic.report.evidence import RunEvidence
from polyclinic.report.sections import again, classes, course, leaving, masks, scores, sites, told, values
from polyclinic.report.summary import summary_of, warnings_of
from polyclinic.report.words import name_of_images

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
        told.section(run),
        told.worth_section(run),
        course.section(run),
        _by_task(run, prevalence),
        *(scores.subgroups(run, column) for column in by or _known_columns(run)),
        leaving.bytes_section(run),
        leaving.sheets_section(run),
        leaving.audit_section(run),
        leaving.privacy_section(run),
        again.section(run),
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
