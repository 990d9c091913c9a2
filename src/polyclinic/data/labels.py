"""Labels: classes, values or masks; their mapping to a study's classes; how far those of sites differ (KS)."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from polyclinic.errors import BadInput, did_you_mean
from polyclinic.randomness import numpy_rng
from polyclinic.settings import NO_LABEL, SEVERAL

if TYPE_CHECKING:
    from polyclinic.data.parts import ImageSet, SiteData

MOST_CLASSES = 12  #: more different numbers than that are values
MOST_GAPS = 0.2  #: share of the labels that may be no number where the others are
FEWEST_OF_A_CLASS = 0.05  #: share of the labels from which on "none" is a class: nothing was found in these images
MOST_LABELS = 64  #: of an image that may have several
#: what people write where they know nothing
NOTHING = {"", "n/a", "na", "nan", "none", "null", "unknown", "missing", "-", "?"}


@dataclass(frozen=True)
class Labels:
    """The task that labels are for; of classes how many images each has, of values their bounds."""

    task: Literal["classification", "regression", "segmentation"]
    classes: dict[str, int] = field(default_factory=dict)
    bounds: tuple[float, float] | None = None

    @classmethod
    def masks(cls) -> "Labels":
        return cls("segmentation")


def labels_of(texts: Sequence[str]) -> Labels:
    """Values where nearly all labels are numbers and many differ; else classes. What is no label does not count."""
    known = [text for text, gap in zip(texts, gaps_in(texts), strict=True) if not gap]
    values = numbers_in(known)
    if values is None:
        return Labels("classification", dict(Counter(known).most_common()))
    return Labels("regression", bounds=(math.floor(min(values)), math.ceil(max(values))))


def refuse_unlearnable(
    classes: Mapping[str, int], about: str, what: str = "label", cure: str = "name a --label"
) -> None:
    """BadInput where all images, counted by class, have one class, or each has one of its own."""
    images = sum(classes.values())
    if len(classes) == 1:
        raise BadInput(f"{about}: every image has the {what} '{next(iter(classes))}'; {cure} that differs")
    if len(classes) == images > MOST_CLASSES:
        raise BadInput(
            f"{about}: each of the {images} images has a {what} of its own, such as '{next(iter(classes))}', and "
            f"nothing can be learnt from one image; {cure} with classes"
        )


def code_notes(texts: Sequence[str]) -> tuple[str, ...]:
    """A note about a value that may stand for "not known": the only negative one, or one of nines far above all."""
    values = numbers_in(texts) or [0.0]
    different = sorted(set(values))
    negative = [value for value in different if value < 0]
    odd = negative if len(negative) == 1 else []
    if len(different) > 1 and re.fullmatch("9{2,}", f"{different[-1]:g}") and different[-1] > 3 * different[-2]:
        odd = [*odd, different[-1]]
    return tuple(
        f"{values.count(code)} of {len(values)} labels are {code:g}: if it stands for 'not known', leave these out"
        for code in odd
    )


def gaps_in(texts: Sequence[str]) -> list[bool]:
    """For each text, True where it says that there is no label. "none" is a class, where words are labels and many
    images have it: none of the diseases."""
    plain = [text.strip().lower() for text in texts]
    others = [text for text in plain if text not in NOTHING]
    is_class = plain.count("none") >= max(2, FEWEST_OF_A_CLASS * len(plain)) and numbers_in(others) is None
    return [text in NOTHING and not (is_class and text == "none") for text in plain]


def are_labels(texts: Sequence[str]) -> list[bool]:
    """For each text, True where it is a label; where nearly all labels are values, one that is none counts as no
    label."""
    gaps = gaps_in(texts)
    are_values = numbers_in([text for text, gap in zip(texts, gaps, strict=True) if not gap]) is not None
    return [not gap and (not are_values or to_number(text) is not None) for text, gap in zip(texts, gaps, strict=True)]


def numbers_in(texts: Sequence[str]) -> list[float] | None:
    """The values of labels, without those that are none; None where labels are classes."""
    found = [value for value in map(to_number, texts) if value is not None]
    is_value = found and len(set(found)) > MOST_CLASSES and len(found) >= (1 - MOST_GAPS) * len(texts)
    return found if is_value else None


def to_number(text: str | float) -> float | None:
    """A finite number, with a decimal point or a decimal comma; 1,000 may be a thousand, and is none."""
    if isinstance(text, str) and re.fullmatch(r"\s*[+-]?\d+,(\d{1,2}|\d{4,})\s*", text):
        text = text.replace(",", ".")
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def sets_of(values: np.ndarray, several: str | tuple[str, ...], place: Callable[[int], str]) -> np.ndarray:
    """Sets of labels as one text each [N], such as `cyst|mass` or `none`: out of cells with a sign between labels, or
    out of columns [N, L] of 0 and 1 with these names."""
    if isinstance(several, str):
        found = [{part.strip() for part in str(cell).split(several)} - {"", NO_LABEL} for cell in values.tolist()]
    else:
        known = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}
        cells = [[known.get(str(cell).strip().lower()) for cell in row] for row in values.tolist()]
        for i, row in enumerate(cells):
            if None in row:
                name = several[row.index(None)]
                raise BadInput(f"{place(i)}: '{name}' must be 0 or 1 (data.several); correct it or remove the image")
        found = [{name for name, is_there in zip(several, row, strict=True) if is_there} for row in cells]
    names = sorted(set().union(*found))
    if not names:
        raise BadInput(
            "data.several: no image has a label, and nothing can be learnt; name other columns or another sign"
        )
    if len(names) > MOST_LABELS:
        raise BadInput(f"data.several: gives {len(names)} labels, and at most {MOST_LABELS} can be learnt")
    if nobody := set(several) - set(names) if isinstance(several, tuple) else set():
        raise BadInput(f"data.several: no image has the label '{min(nobody)}', which cannot be learnt; leave it out")
    if bad := next((name for name in names if SEVERAL in name), ""):
        raise BadInput(f"data.several: the label '{bad}' contains '{SEVERAL}'; write data.several = '{SEVERAL}'")
    return np.array([SEVERAL.join(sorted(one)) or NO_LABEL for one in found])


# --- mapping of labels to classes -----------------------------------------------------------------------------


#: a label as it stands in a file, or its name
Value = int | float | str | bool


def classes_of(
    values: np.ndarray,
    names: Sequence[str] | np.ndarray | None = None,
    merge: Mapping[str, Sequence[Value]] | None = None,
    rename: Mapping[str, str] | None = None,
    *,
    field: str = "data.merge",
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Class indices (int64 [N]) and the names of the classes, out of labels as they stand in a file.

    `names[v]` is the name of the integer label v. `merge` makes one class of several labels, `rename` gives a
    label another name; both take labels or their names. Classes are in the order of their smallest label.
    """
    present, position = np.unique(values, return_inverse=True)
    order = sorted(range(len(present)), key=lambda i: natural(str(present[i])))
    unnamed = [] if names is None else [value for value in present.tolist() if not 0 <= int(value) < len(names)]
    if names is not None and unnamed:
        raise BadInput(f"data.labels: the label {unnamed[0]} has no name: there are {len(names)} names, from 0 on")
    titles = [str(present[i]) if names is None else str(names[int(present[i])]) for i in order]
    aliases = {str(present[i]): title for i, title in zip(order, titles, strict=True)}
    becomes = {title: title for title in titles}
    for target, members in (merge or {}).items():
        becomes |= dict.fromkeys((_find(member, aliases, f"{field}.{target}") for member in members), target)
    for old, new in (rename or {}).items():
        becomes[_find(old, aliases, "data.rename")] = new
    final = [becomes[title] for title in titles]
    classes = tuple(dict.fromkeys(final))
    number = np.empty(len(present), dtype=np.int64)
    number[order] = [classes.index(name) for name in final]
    return number[position.reshape(-1)], classes


def kept(columns: Mapping[str, np.ndarray], keep: Mapping[str, Sequence[Value]]) -> np.ndarray:
    """Indices of the rows that have, in every column that `keep` names, one of its values."""
    chosen = np.array(True)
    for name, wanted in keep.items():
        if name not in columns:
            raise BadInput(f"data.keep: there is no '{name}'; choose from {', '.join(sorted(columns))}")
        texts = np.array([_text(value) for value in columns[name].reshape(-1).tolist()])
        absent = [value for value in wanted if _text(value) not in texts]
        if absent:
            raise BadInput(f"data.keep.{name}: no image has the value {absent[0]!r}")
        chosen = chosen & np.isin(texts, [_text(value) for value in wanted])
    if not chosen.any():
        raise BadInput("data.keep: no image has all the values to keep; keep more")
    return np.flatnonzero(chosen)


def natural(text: str) -> list[tuple[int, int, str]]:
    """A sorting key that puts 2 before 10, and numbers before words."""
    parts = re.split(r"(\d+)", text)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part]


def _find(wanted: Value, aliases: Mapping[str, str], field: str) -> str:
    """The name of the label that `wanted` means: a label as it stands in the file, or a name."""
    if str(wanted) in aliases:
        return aliases[str(wanted)]
    if wanted in aliases.values():
        return str(wanted)
    raise BadInput(f"{field}: no image has the label {wanted!r}; there are {', '.join(aliases)}")


def _text(value: object) -> str:
    """One spelling for a value however it is stored: true and 1.0 and 1 differ, 2 and '2' do not."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def balanced(labels: np.ndarray, per_class: int, seed: int) -> np.ndarray:
    """Indices, ascending, of `per_class` images of each class, drawn by the seed."""
    chosen = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        if len(members) < per_class:
            raise BadInput(f"data.per_class: class {label} has only {len(members)} images, not {per_class}")
        chosen.append(numpy_rng(seed, "per_class", int(label)).choice(members, per_class, replace=False))
    return np.sort(np.concatenate(chosen))


# --- label sets -----------------------------------------------------------------------------------------------


SETTING = "federation.label_sets"


def unknown_classes(
    known: Mapping[str, Sequence[str]], sites: Sequence[str], classes: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """By site, the numbers of the classes that it does not know. BadInput for names of sites and classes that there are
    not, and for a class that no site knows."""
    for site, some in known.items():
        if site not in sites:
            raise BadInput(f"{SETTING}: there is no site '{site}'; the sites are {', '.join(sites)}")
        for name in some:
            if name not in classes:
                hint = did_you_mean(name, list(classes))
                raise BadInput(f"{SETTING}: there is no class '{name}'{hint}; the classes are {', '.join(classes)}")
        if len(set(some)) < 2:
            raise BadInput(f"{SETTING}: site '{site}' must know two classes or more to tell them apart; name them")
    everybody = {name for site in sites for name in known.get(site, classes)}
    if lost := [name for name in classes if name not in everybody]:
        raise BadInput(f"{SETTING}: no site knows '{lost[0]}'; name it at a site, or take the class out of the data")
    return {site: tuple(n for n, name in enumerate(classes) if name not in some) for site, some in known.items()}


def without_classes(data: "SiteData", unknown: Sequence[int]) -> "SiteData":
    """A site's images without those of classes that it does not know: nobody there could have labelled them."""

    def without(part: "ImageSet") -> "ImageSet":
        rows = np.flatnonzero(~np.isin(np.asarray(part.labels), unknown))
        return part if len(rows) == len(part) else part.take(rows)

    return data.changed(without)


# --- heterogeneity ------------------------------------------------------------------------------------------


#: share of what a guess without the site gets wrong, at most, that the site leaves open where it nearly is the class
LEFT_OPEN = 0.25
#: images below which sites differ by chance
ENOUGH_IMAGES = 20
#: bins of a histogram of values
VALUE_BINS = 24


def pairwise_ks(labels_by_site: Mapping[str, np.ndarray]) -> np.ndarray:
    """KS statistic of every pair of sites, float64 [K, K], symmetric, zero on the diagonal.

    It is the largest gap between the two cumulative distributions: 0 where they are the same, 1 where all
    labels of one site lie below all labels of the other. For two classes it is the difference of the class
    shares. For more classes it is taken on class indices: natural where classes are ordered (grades); where
    they are not, its size depends on the order in which they are listed, and only its zero does not.
    """
    labels = list(labels_by_site.values())
    values, which = np.unique(np.concatenate(labels), return_inverse=True)
    counts = np.zeros((len(labels), len(values)))
    np.add.at(counts, (np.repeat(np.arange(len(labels)), [len(each) for each in labels]), which), 1)
    # the share of each site's labels at or below each value that occurs anywhere, [K, values]
    cumulative = np.cumsum(counts, axis=1) / np.maximum(1, counts.sum(axis=1, keepdims=True))
    table = np.zeros((len(cumulative), len(cumulative)))
    for i in range(1, len(cumulative)):
        table[i, :i] = table[:i, i] = np.abs(cumulative[:i] - cumulative[i]).max(axis=1)
    return table


def label_histograms(labels_by_site: Mapping[str, np.ndarray], classes: int) -> dict[str, Any]:
    """Number of labels of each site in each bin, `per_site`: a bin for each class, or bins between `edges`."""
    if classes:
        counts = {site: np.bincount(own, minlength=classes).tolist() for site, own in labels_by_site.items()}
        return {"edges": None, "per_site": counts}
    edges = np.histogram_bin_edges(np.concatenate(list(labels_by_site.values())), bins=VALUE_BINS)
    counts = {site: np.histogram(own, edges)[0].tolist() for site, own in labels_by_site.items()}
    return {"edges": [float(edge) for edge in edges], "per_site": counts}


def mean_ks(labels_by_site: Mapping[str, np.ndarray]) -> float:
    """Mean of `pairwise_ks` over the pairs of sites; 0 for a single site."""
    table = pairwise_ks(labels_by_site)
    pairs = table[np.triu_indices(len(table), k=1)]
    return float(pairs.mean()) if len(pairs) else 0.0


def masked_share(masks: np.ndarray | None) -> float:
    """The share of pixels inside a mask, of masks [N, H, W] read one by one; 0 where there are none."""
    return float(np.mean([np.mean(mask > 0) for mask in masks])) if masks is not None and len(masks) else 0.0


def tells_class(counts: Sequence[Sequence[int] | np.ndarray]) -> tuple[float, float] | None:
    """The share of images, counted by site and class, whose class the site alone tells, and that of the most frequent
    class; None unless the site tells nearly all, and several classes and sites have images."""
    table = np.array([row for row in counts if sum(row)], float)
    if len(table) < 2 or (table.sum(0) > 0).sum() < 2 or table.sum() < ENOUGH_IMAGES:
        return None
    told, most = float(table.max(1).sum() / table.sum()), float(table.sum(0).max() / table.sum())
    return (told, most) if 1 - told <= (1 - most) * LEFT_OPEN else None
