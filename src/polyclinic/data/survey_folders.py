"""A first look at images in folders: a folder per class, or folders of hospitals with the same classes in each."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyclinic.data.allowed_paths import safe_name
from polyclinic.data.labels import MOST_CLASSES
from polyclinic.data.survey_headers import institutions_note, institutions_of
from polyclinic.data.survey_tables import IMAGE_FOLDER, MOST_SITES
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
    parts = [_below_split(file.relative_to(top).parts) for file in files]
    if any(len(part) < 3 for part in parts):
        return None
    upper, lower = [part[0] for part in parts], [part[1] for part in parts]
    if not _is_grid(upper, lower):
        return None
    institutions = institutions_of(files)
    swapped = _are_sites(lower, institutions) if institutions else _sound_like_sites(lower, upper)
    if swapped and not _are_sites(upper, institutions):
        note = _sentence(lower, upper, "lower", "upper", bool(institutions))
        return Levels(institutions or lower, upper, note, upper_are_sites=False)
    return Levels(institutions or upper, lower, _sentence(upper, lower, "upper", "lower", bool(institutions)))


def hospitals_of(paths: Sequence[str], labels: Sequence[str] | None = None) -> list[str] | None:
    """The first folder of each path, where these folders look like hospitals: few, with several images each, and not
    what the labels say already. None where they do not."""
    parts = [_below_packs(path) for path in paths]
    if any(len(part) < 2 for part in parts):
        return None
    found = [part[0] for part in parts]
    names = set(found)
    few = 2 <= len(names) <= MOST_SITES and len(paths) >= FEWEST_AT_A_SITE * len(names)
    packed = any((NEITHER.match(name) or PACKED.search(name)) and not SITE.search(name) for name in names)
    packed = packed or all(PATIENT_FOLDER.match(name) for name in names)
    return None if not few or packed or _say_the_label(found, labels) else [safe_name(name) for name in found]


def _say_the_label(folders: Sequence[str], labels: Sequence[str] | None) -> bool:
    """Whether each folder has the name of a class, or holds images of one label only."""
    if all(CLASS.match(name) for name in set(folders)):
        return True  # also where masks are what is learnt, and nothing is a label
    if labels is None:
        return False
    pure = len(set(zip(folders, labels, strict=True))) == len(set(folders))
    return pure or are_same_names(folders, labels)


def tops_of(paths: Sequence[str], sites: Sequence[str] | None = None) -> list[str] | None:
    """The uppermost folder of each path, below its hospital where the path names it: that of a patient, if any is.
    None where a path has no such folder."""
    parts = [_below_packs(path) for path in paths]
    named = sites is not None and all(safe_name(part[0]) == site for part, site in zip(parts, sites, strict=True))
    depth = 2 if named else 1
    return None if any(len(part) <= depth for part in parts) else ["/".join(part[:depth]) for part in parts]


def patients_in(tops: Sequence[str]) -> bool:
    """Whether folders are those of patients by their names, some with several images."""
    return 1 < len(set(tops)) < len(tops) and all(PATIENT_FOLDER.match(Path(top).name) for top in tops)


def patients_note(tops: Sequence[str]) -> str:
    return f"the folders {some(tops)} are taken for the patients; if they are none, give --patient REGEX"


def like_names(sites: Iterable[str]) -> list[str]:
    """A sentence about sites that may be one: their names differ by case, blanks and signs only."""
    spelled: defaultdict[str, list[str]] = defaultdict(list)
    for name in sites:
        spelled[re.sub(r"[\W_]+", "", name).casefold()].append(name)
    pairs = [" and ".join(names) for names in spelled.values() if len(names) > 1]
    return [f"sites that may be one: {', '.join(pairs)}; write them alike if so"] if pairs else []


def hospitals_note(sites: Sequence[str]) -> str:
    return (
        f"the uppermost folders ({some(sites)}) are taken for the sites; if they are none, set "
        'sites.partition = "iid" and sites.count'
    )


def _below_split(parts: tuple[str, ...]) -> tuple[str, ...]:
    return parts[1:] if parts[0].lower() in SPLIT_NAMES else parts


def _below_packs(path: str) -> tuple[str, ...]:
    """A path without the folders of splits and of images that it begins with: hospitals may lie in them."""
    parts = tuple(part for part in Path(path).parts if part not in ("..", "."))
    while len(parts) > 1 and (parts[0].lower() in SPLIT_NAMES or IMAGE_FOLDER.match(parts[0])):
        parts = parts[1:]
    return parts


def _is_grid(upper: Sequence[str], lower: Sequence[str]) -> bool:
    """Whether at least two folders have at least two sub-folders of the same names; a site may lack some classes."""
    sites, classes, pairs = set(upper), set(lower), set(zip(upper, lower, strict=True))
    by_class = Counter(name for _, name in pairs)
    few = 2 <= len(sites) <= MOST_SITES and 2 <= len(classes) <= MOST_CLASSES
    is_shared = min(by_class.values(), default=0) >= 2 and len(pairs) >= 0.6 * len(sites) * len(classes)
    others = classes & set(SPLIT_NAMES) or all(NEITHER.match(name) for name in classes)
    return few and is_shared and not others


def _sound_like_sites(lower: Sequence[str], upper: Sequence[str]) -> bool:
    """Whether names alone say that the lower folders are sites."""

    def points(names: Sequence[str]) -> int:
        return sum(bool(SITE.search(name)) - bool(CLASS.match(name)) for name in set(names))

    return points(lower) > points(upper)


def _are_sites(folders: Sequence[str], institutions: Sequence[str] | None) -> bool:
    """Whether each folder holds the images of one institution only, and the other way round."""
    return institutions is not None and one_to_one(folders, institutions)


def one_to_one(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether two lists say the same with other words."""
    partners: defaultdict[str, set[str]] = defaultdict(set)
    for one, other in zip(first, second, strict=True):
        partners[f"a{one}"].add(other)
        partners[f"b{other}"].add(one)
    return len(set(first)) > 1 and all(len(found) == 1 for found in partners.values())


def are_same_names(first: Iterable[str], second: Iterable[str]) -> bool:
    """Whether two sets of names are the same, but for case, blanks and signs."""

    def plain(names: Iterable[str]) -> set[str]:
        return {re.sub(r"[\W_]+", "", name).casefold() for name in names}

    return plain(first) == plain(second)


def _sentence(sites: Sequence[str], classes: Sequence[str], where: str, other: str, from_headers: bool) -> str:
    taken = f"{other} folders ({some(classes)}) are taken for the classes"
    if from_headers:
        return f"{taken}; {institutions_note(len(set(sites)))}"
    return (
        f"{where} folders ({some(sites)}) are taken for the sites, {taken}; if it is the other way round, swap the "
        "columns' names label and site in the table below"
    )


def some(names: Sequence[str], most: int = 4) -> str:
    """The first few different names."""
    different = sorted(set(names))
    return ", ".join([*different[:most], *(["..."] if len(different) > most else [])])
