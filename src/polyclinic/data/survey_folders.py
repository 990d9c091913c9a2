"""A first look at folders and headers: which level names hospitals, classes or patients, and what DICOM files say."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from polyclinic.data.allowed_paths import safe_name
from polyclinic.data.labels import MOST_CLASSES
from polyclinic.data.reading import count_slices, is_dicom, is_volume_name, read_dicom
from polyclinic.data.survey_cases import IMAGE_FOLDER, MOST_SITES
from polyclinic.data.tables import SPLIT_NAMES

#: names of folders that say what images show, and where they were taken
CLASS = re.compile(
    r"^(normal|healthy|abnormal|benign|malignant|melanoma|n(a)?evus|positive|negative|pos|neg|control|disease[d]?|sick"
    r"|ill|tb|tuberculosis|covid.*|pneumonia|no[_ -]?(finding|tumou?r)|lesion|tumou?r|cancer|carcinoma|glioma"
    r"|meningioma|yes|no|class.*|grade.*|\d)$",
    re.I,
)
SITE = re.compile(r"(site|hospital|cent(er|re)|clinic|klinik|institut|scanner|universit)", re.I)
#: names of folders that say neither
NEITHER = re.compile(
    r"^(left|right|l|r|images?|imgs?|png|jpe?g|dicom|dcm|(p|pat|patient|case|subject)?[_-]?\d{2,})$", re.I
)
#: names of folders that say how somebody has packed images, and not where they were taken
PACKED = re.compile(
    r"(^|[_ -])(images?|imgs?|pictures?|photos?|scans?|data|part|batch|fold|set|subset|train(ing)?|test(ing)?|val"
    r"(idation)?)([_ -]?\d+)?$|\d{3,}",
    re.I,
)
#: names of folders that hold what belongs to one patient
PATIENT_FOLDER = re.compile(r"^(p|pat|patient|sub|subj|subject|case|person)[_ -]?\d+$", re.I)
FEWEST_AT_A_SITE = 5  #: images of a folder, on average, that is taken for a hospital; a patient has fewer
FILLED = 0.6  #: share of all pairs of hospital and class that must have images: a hospital may lack a class
INSTITUTIONS_NOTE = "the sites are those that the DICOM files name ({count} different InstitutionName)"
TAGS = ("PatientID", "InstitutionName")
COUNTED = 5  #: volumes whose slices are counted: their headers are read whole


@dataclass(frozen=True)
class Levels:
    """Each file's site and class, where two levels of folders say both, and what to say about it."""

    sites: list[str]
    labels: list[str]
    note: str
    upper_are_sites: bool = True


def levels_of(top: Path, files: Sequence[Path]) -> Levels | None:
    """The same few names of folders in every folder of `top`: the upper level are sites, the lower one classes, unless
    DICOM headers or the names say that it is the other way round. None where it is no such tree."""
    paths = [file.relative_to(top).parts for file in files]
    parts = [path[1:] if path[0].lower() in SPLIT_NAMES else path for path in paths]
    if any(len(part) < 3 for part in parts):
        return None
    upper, lower = [part[0] for part in parts], [part[1] for part in parts]
    if not _is_grid(upper, lower):
        return None
    institutions = institutions_of(files)
    swapped = one_to_one(lower, institutions) if institutions else _site_points(lower) > _site_points(upper)
    swapped = swapped and not (institutions and one_to_one(upper, institutions))
    sites, classes, where, other = (lower, upper, "lower", "upper") if swapped else (upper, lower, "upper", "lower")
    note = f"{other} folders ({some(classes)}) are taken for the classes"
    if institutions:
        note = f"{note}; {INSTITUTIONS_NOTE.format(count=len(set(sites)))}"
    else:
        note = (
            f"{where} folders ({some(sites)}) are taken for the sites, {note}; if it is the other way round, swap the "
            "columns' names label and site in the table below"
        )
    return Levels(institutions or sites, classes, note, upper_are_sites=not swapped)


def _is_grid(upper: Sequence[str], lower: Sequence[str]) -> bool:
    """True where at least two folders have at least two sub-folders of the same names; a site may lack some classes."""
    sites, classes, pairs = set(upper), set(lower), set(zip(upper, lower, strict=True))
    by_class = Counter(name for _, name in pairs)
    few = 2 <= len(sites) <= MOST_SITES and 2 <= len(classes) <= MOST_CLASSES
    is_shared = min(by_class.values(), default=0) >= 2 and len(pairs) >= FILLED * len(sites) * len(classes)
    others = classes & set(SPLIT_NAMES) or all(NEITHER.match(name) for name in classes)
    return few and is_shared and not others


def _site_points(names: Sequence[str]) -> int:
    """Number of names that sound like sites, less those that sound like classes."""
    return sum(bool(SITE.search(name)) - bool(CLASS.match(name)) for name in set(names))


def hospitals_of(paths: Sequence[str], labels: Sequence[str] | None = None) -> list[str] | None:
    """The first folder of each path, where these folders look like hospitals: few, with several images each, and not
    what the labels say already. None where they do not."""
    parts = [_below_packs(path) for path in paths]
    if any(len(part) < 2 for part in parts):
        return None
    found = [part[0] for part in parts]
    names = set(found)
    # a folder for each label, or of its name
    said = labels and (len(set(zip(found, labels, strict=True))) == len(names) or are_same_names(names, labels))
    rules = (
        2 <= len(names) <= MOST_SITES,
        len(paths) >= FEWEST_AT_A_SITE * len(names),
        not any((NEITHER.match(name) or PACKED.search(name)) and not SITE.search(name) for name in names),
        not all(PATIENT_FOLDER.match(name) for name in names),
        not all(CLASS.match(name) for name in names),  # also where masks are what is learnt, and nothing is a label
        not said,
    )
    return [safe_name(name) for name in found] if all(rules) else None


def tops_of(paths: Sequence[str], sites: Sequence[str] | None = None) -> list[str]:
    """The uppermost folder of each path, below its hospital where the path names it: that of a patient, if any is.
    Nothing where a path has no such folder."""
    parts = [_below_packs(path) for path in paths]
    named = sites is not None and all(safe_name(part[0]) == site for part, site in zip(parts, sites, strict=True))
    depth = 2 if named else 1
    return [] if any(len(part) <= depth for part in parts) else ["/".join(part[:depth]) for part in parts]


def patient_folders(paths: Sequence[str], sites: Sequence[str] | None) -> list[str] | None:
    """`tops_of`, where these are folders of patients by their names, some with several images or visits."""
    tops = tops_of(paths, sites)
    several = 1 < len(set(tops)) < len(tops)
    return tops if several and all(PATIENT_FOLDER.match(Path(top).name) for top in tops) else None


def like_names(sites: Iterable[str]) -> list[str]:
    """A sentence about sites that may be one: their names differ by case, blanks and signs only."""
    spelled: defaultdict[str, list[str]] = defaultdict(list)
    for name in sites:
        spelled[_letters(name)].append(name)
    pairs = [" and ".join(names) for names in spelled.values() if len(names) > 1]
    return [f"sites that may be one: {', '.join(pairs)}; write them alike if so"] if pairs else []


def are_same_names(first: Iterable[str], second: Iterable[str]) -> bool:
    """True where two sets of names are the same, but for case, blanks and signs."""
    return set(map(_letters, first)) == set(map(_letters, second))


def _letters(name: str) -> str:
    return re.sub(r"[\W_]+", "", name).casefold()


def one_to_one(first: Sequence[str], second: Sequence[str]) -> bool:
    """True where two lists say the same with other words."""
    pairs = set(zip(first, second, strict=True))
    return len(set(first)) > 1 and len(pairs) == len(set(first)) == len(set(second))


def some(names: Sequence[str], most: int = 4) -> str:
    """The first few different names."""
    different = sorted(set(names))
    return ", ".join([*different[:most], *(["..."] if len(different) > most else [])])


def _below_packs(path: str) -> tuple[str, ...]:
    """A path without the folders of splits and of images that it begins with: hospitals may lie in them."""
    parts = tuple(part for part in Path(path).parts if part not in ("..", "."))
    while len(parts) > 1 and (parts[0].lower() in SPLIT_NAMES or IMAGE_FOLDER.match(parts[0])):
        parts = parts[1:]
    return parts


# --- headers --------------------------------------------------------------------------------------------


def slices_of(files: Sequence[Path]) -> int:
    """Slices of a volume, in the median of a few; 1 where there are no volumes."""
    counts = [count_slices(file) for file in [file for file in files if is_volume_name(file)][:COUNTED]]
    return int(np.median(counts)) if counts else 1


def patients_of(files: Sequence[Path], sites: Sequence[str] | None = None) -> list[str] | None:
    """A number for the patient of each DICOM file, as p1: neither a name nor a digest, from which an id could be found
    by trying. None where a file is no DICOM or names no patient, and where no patient has several images."""
    found = _ids(files, sites)
    if found is None or not 1 < len(set(found)) < len(files):
        return None
    numbers = {patient: f"p{number}" for number, patient in enumerate(dict.fromkeys(found), start=1)}
    return [numbers[patient] for patient in found]


def count_patients(files: Sequence[Path], sites: Sequence[str] | None = None) -> int | None:
    """Number of different patients that the DICOM files name; None where one names none, or all name the same."""
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


def _tags(files: Sequence[Path], tag: str) -> list[str] | None:
    """The value of a tag in each DICOM file; None where one is no DICOM, or says nothing."""
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
    try:
        header = read_dicom(file, stop_before_pixels=True, specific_tags=list(TAGS))
    except Exception:  # a broken file is named by `study check`
        return ("",) * len(TAGS)
    return tuple(str(header.get(tag, "")).strip() for tag in TAGS)
