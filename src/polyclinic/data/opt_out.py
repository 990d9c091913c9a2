"""Patients who opted out (`data.opt_out`): a list that is read at every start, and images without theirs.

The split and the spread over sites are drawn first, with everybody, and then they are taken out: nobody else changes
sides, and the run is one that never saw them.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from polyclinic.data.dataset import Dataset
from polyclinic.errors import BadInput

REMARK = re.compile(r"(?:^|\s)#.*")  #: a # within a name belongs to it
OPT_OUT = "opt-out.txt"  #: in the folder `local` of a kit: who opted out of every study


def names_in(file: Path, flag: str = "data.opt_out") -> list[str]:
    """Patients in a text file, a line each; what follows a # at the beginning or after a space is a remark."""
    try:
        lines = file.expanduser().read_text(encoding="utf-8-sig").splitlines()  # Windows marks a file's begin
    except (OSError, UnicodeDecodeError):
        raise BadInput(f"{flag}: '{file}' cannot be read; write a patient in each line, as UTF-8") from None
    return sorted({name for line in lines if (name := REMARK.sub("", line).strip())})


def names_of(dataset: Dataset) -> np.ndarray:
    """What each image's patient is called, str [N]; the number of the image where the data knows no patients."""
    return np.asarray(np.arange(len(dataset)) if dataset.patient is None else dataset.patient).astype(str)


def without_patients(
    where: Mapping[str, Mapping[str, np.ndarray]], dataset: Dataset, names: Collection[str]
) -> dict[str, dict[str, np.ndarray]]:
    """Indices by site and split without the images of these patients."""
    gone = np.isin(names_of(dataset), list(names))
    found = {site: {split: rows[~gone[rows]] for split, rows in parts.items()} for site, parts in where.items()}
    for site, parts in found.items():
        if not len(parts["train"]) and len(where[site]["train"]):
            raise BadInput(f"data.opt_out: site '{site}' has no training images left; leave the site out")
    return found
