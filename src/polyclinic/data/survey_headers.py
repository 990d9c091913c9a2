"""What headers of medical files say in a first look: how many slices a volume has, whose images they are, and
where they were taken."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from polyclinic.data.allowed_paths import safe_name
from polyclinic.data.reading import count_slices, is_dicom, is_volume_name
from polyclinic.data.survey_tables import MOST_SITES

TAGS = ("PatientID", "InstitutionName")
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


def patients_of(files: Sequence[Path], sites: Sequence[str] | None = None) -> list[str] | None:
    """A number for the patient of each DICOM file, as p1: neither a name nor a digest, from which an id could be found
    by trying. None where a file is no DICOM or names no patient, and where no patient has several images."""
    found = _ids(files, sites)
    if found is None or not 1 < len(set(found)) < len(files):
        return None
    numbers = {patient: f"p{number}" for number, patient in enumerate(dict.fromkeys(found), start=1)}
    return [numbers[patient] for patient in found]


def count_patients(files: Sequence[Path], sites: Sequence[str] | None = None) -> int | None:
    """How many different patients the DICOM files name; None where one names none, or all name the same."""
    found = set(_ids(files, sites) or ())
    return len(found) if len(found) > 1 else None


def _ids(files: Sequence[Path], sites: Sequence[str] | None) -> list[tuple[str, str]] | None:
    """Site and PatientID of each file: two hospitals may give two patients the same id."""
    found = _tags(files, "PatientID")
    return None if found is None else list(zip(sites or [""] * len(found), found, strict=True))


def institutions_of(files: Sequence[Path]) -> list[str] | None:
    """The InstitutionName of each DICOM file as a site's name; None where a file has none, or all have the same."""
    found = _tags(files, "InstitutionName")
    if found is None:
        return None
    spelled: dict[str, str] = {}  # "ST MARY" and "St Mary" are one hospital
    names = [spelled.setdefault(safe_name(name).casefold(), safe_name(name)) for name in found]
    return names if 1 < len(spelled) <= MOST_SITES else None


def institutions_note(count: int) -> str:
    return f"the sites are those that the DICOM files name ({count} different InstitutionName)"


def _tags(files: Sequence[Path], tag: str) -> list[str] | None:
    """What each DICOM file says under a tag; None where one is no DICOM, or says nothing."""
    if not files or not all(is_dicom(file) for file in files):
        return None
    found = []
    for file in files:
        value = _tags_of(file, file.stat().st_mtime_ns)[TAGS.index(tag)]
        if not value:
            return None
        found.append(value)
    return found


@lru_cache(maxsize=100_000)
def _tags_of(file: Path, modified: int) -> tuple[str, ...]:
    import pydicom  # imported where it is used: it takes time

    try:
        header = pydicom.dcmread(file, stop_before_pixels=True, specific_tags=list(TAGS))
    except Exception:  # a broken file is named by `study check`
        return ("",) * len(TAGS)
    return tuple(str(header.get(tag, "")).strip() for tag in TAGS)
