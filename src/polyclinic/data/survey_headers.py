"""What headers of medical files say in a first look: how many slices a volume has, and whose images they are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from polyclinic.data.reading import count_slices, is_dicom, is_volume_name
from polyclinic.data.survey_tables import Cases

LOOKED_AT = 5  #: volumes whose slices are counted


def slices_of(files: Sequence[Path]) -> int:
    """How many slices a volume has, in the median of a few; 1 where there are no volumes."""
    counts = []
    for file in [file for file in files if is_volume_name(file)][:LOOKED_AT]:
        try:
            counts.append(count_slices(file))
        except Exception:  # a broken file is named by `study check`
            continue
    return int(np.median(counts)) if counts else 1


def middle_slices_note(slices: int) -> str:
    """What is said where a study takes one slice of many."""
    return f"volumes of about {slices} slices: the middle slice of each is used; data.slices = 'all' takes every one"


def cases_by_patient(top: Path, classes: Sequence[Path], files: Sequence[Path]) -> Cases | None:
    """DICOM images in a folder per class as cases with their patients, where a patient has several images.

    The table has a digest of each PatientID, and no name. None where a file is no DICOM, or names no patient.
    """
    if not files or not all(is_dicom(file) for file in files):
        return None
    patients = [_patient(file) for file in files]
    if not all(patients) or not 1 < len(set(patients)) < len(files):
        return None
    label = {file: folder.name for folder in classes for file in files if file.is_relative_to(folder)}
    rows = [
        {"path": file.relative_to(top).as_posix(), "label": label[file], "patient": patient}
        for file, patient in zip(files, patients, strict=True)
        if file in label
    ]
    return Cases(top, rows, ("path", "label", "patient"), notes=("patients are those of the DICOM files",))


def _patient(file: Path) -> str:
    """A digest of the patient that a DICOM file names; nothing where it names none."""
    import pydicom  # imported where it is used: it takes time

    try:
        found = str(pydicom.dcmread(file, stop_before_pixels=True, specific_tags=["PatientID"]).get("PatientID", ""))
    except Exception:  # a broken file is named by `study check`
        return ""
    return hashlib.sha256(found.encode()).hexdigest()[:16] if found.strip() else ""
