"""A dataset in memory, and its splits into train, validation and test.

Splits are by patient where there is one, stratified, and fixed by the seed on any machine. They are made before sites
are, so that a patient who is in the training data of one site cannot be in the test data of another. In
cross-validation (`data.fold = "2/5"`) the test images are one of several folds. Test images can have as many of each
class: at every site, so that accuracy means the same everywhere (FedER, 4.1), or in all (FELICIA, 5.3).
"""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.volumes.volume import are_volumes
from polyclinic.errors import BadInput
from polyclinic.randomness import numpy_rng


@dataclass(frozen=True)
class Dataset:
    """N images with their labels. Per-image arrays have length N or are None.

    images    uint8 [N, C, H, W], an array or a memory map; C is 1 or 3. Or objects [N], each a `Volume` with its mask
    labels    int64 [N] class indices, or float32 [N] values for regression
    classes   names of the classes, empty for regression
    unit      unit of a regression label, e.g. "months"
    label_range  public lower and upper bound of a regression label
    masks     uint8 [N, H, W] of 0/1 for segmentation
    patient   any dtype [N]; images of one patient never lie on both sides of a split
    site      str [N], the institution an image comes from
    split     str [N], "train" / "validation" / "test" where the source fixes it, "" where it does not
    subgroup  str [N], a finer label inside a class (e.g. the lesion type inside "malignant")
    ids       str [N], a name a human can find the image by
    columns   str [N, K], more of each image, such as sex or scanner, for results by sub-group
    twins     int64 [N], the first image that is the same; images that are the same are carved into one split
    geometry  float32 [N, 4]: width and height in pixels, as the files have them, and millimetres between columns and
              rows, NaN where nobody says
    column_names  names of the K columns
    """

    images: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...] = ()
    unit: str = ""
    label_range: tuple[float, float] | None = None
    masks: np.ndarray | None = None
    patient: np.ndarray | None = None
    site: np.ndarray | None = None
    split: np.ndarray | None = None
    subgroup: np.ndarray | None = None
    ids: np.ndarray | None = None
    columns: np.ndarray | None = None
    geometry: np.ndarray | None = None
    column_names: tuple[str, ...] = ()
    twins: np.ndarray | None = None

    PER_IMAGE = ("images", "labels", "masks", "patient", "site", "split", "subgroup", "ids", "columns", "geometry")

    def __post_init__(self) -> None:
        for name in self.PER_IMAGE:
            array = getattr(self, name)
            if array is not None and len(array) != len(self.images):
                raise ValueError(f"{name} has {len(array)} entries for {len(self.images)} images")
        if not are_volumes(self.images) and (self.images.dtype != np.uint8 or self.images.ndim != 4):
            raise ValueError(f"images must be uint8 [N, C, H, W], not {self.images.dtype} {self.images.shape}")

    def __len__(self) -> int:
        return len(self.images)

    def take(self, index: np.ndarray) -> "Dataset":
        """The images at `index`, in that order."""
        chosen = {f.name: getattr(self, f.name) for f in fields(self) if f.name in self.PER_IMAGE}
        arrays = {name: array[index] for name, array in chosen.items() if array is not None}
        return replace(self, **arrays, twins=None if self.twins is None else self.twins[index])


# --- splits -------------------------------------------------------------------------------------------------


SPLITS = ("train", "validation", "test")
AGE_STRATA = 10  #: deciles of values: splits are alike over their whole range


@dataclass(frozen=True)
class Fold:
    """One fold of a cross-validation: `number` counts from 1 to `count`."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Fold":
        """`2/5`: the second of five folds; ValueError where it is not one."""
        number, slash, count = text.partition("/")
        if not (slash and number.isascii() and number.isdigit() and count.isascii() and count.isdigit()):
            raise ValueError(f"write it as 2/5, the second of five folds, not '{text}'")
        fold = cls(int(number), int(count))
        if fold.count < 2 or not 1 <= fold.number <= fold.count:
            raise ValueError(f"there is no fold {text}; of five folds the first is 1/5 and the last 5/5")
        return fold

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def split(
    dataset: Dataset,
    *,
    validation: float,
    test: float,
    seed: int,
    fold: Fold | None = None,
    tuning_fold: Fold | None = None,
) -> dict[str, np.ndarray]:
    """Indices (int64, ascending) of the images of each split.

    A split that the source fixes is kept. A split that it leaves out is carved, by patient, out of the images
    that it calls "train" or does not call anything; `validation` and `test` are shares of those images.

    With a `fold`, the test images are that fold, whatever the source and `test` say; `validation` stays a share of all
    images. With a `tuning_fold`, the test images stay as they are, and the validation images are that fold of the rest.
    """
    groups = kept_together(dataset)
    if fold is not None:
        assigned = np.where(folds(dataset, fold.count, seed) == fold.number, "test", "").astype("<U10")
        shares, address = {"validation": validation * fold.count / (fold.count - 1)}, f"split of fold {fold}"
    else:
        assigned, address = _fixed_by_source(dataset, patient_groups(dataset)), "split"
        shares = {name: share for name, share in (("validation", validation), ("test", test)) if name not in assigned}
    pool = np.flatnonzero(assigned == "")
    assigned[pool] = _carve(dataset, groups, pool, shares, seed, address)
    if tuning_fold is not None:
        rest = np.flatnonzero(assigned != "test")
        number = folds(dataset, tuning_fold.count, seed, rest)
        assigned[rest] = np.where(number == tuning_fold.number, "validation", "train")
    result = {name: np.flatnonzero(assigned == name) for name in SPLITS}
    for name, index in result.items():
        if len(index) == 0 and (name != "validation" or validation > 0):
            raise BadInput(f"data: the {name} split is empty; use more patients or other shares of validation and test")
    return result


def folds(dataset: Dataset, count: int, seed: int, pool: np.ndarray | None = None) -> np.ndarray:
    """int64 [N]: the fold of each image of `pool` (all of them), 1 to `count`. A patient's images are all in one fold,
    and the images of each institution and of each kind of label are spread over all folds."""
    groups = kept_together(dataset)
    pool = np.arange(len(dataset)) if pool is None else pool
    members, first, sizes = np.unique(groups[pool], return_index=True, return_counts=True)
    if len(members) < count:
        raise BadInput(f"data.fold: {count} folds need as many patients, and there are {len(members)}; take fewer")
    home = _number(dataset.site[pool][first]) if dataset.site is not None else np.zeros(len(members), dtype=np.int64)
    strata = _strata(dataset, groups, pool, first)
    choice = np.zeros(len(members), dtype=np.int64)
    for site in np.unique(home):
        inside = np.flatnonzero(home == site)
        # the order differs from site to site: else the first folds would get one image more at every site
        order = numpy_rng(seed, "order of folds", int(site)).permutation(count)
        wanted = np.full(count, 1 / count)
        choice[inside] = order[_deal(sizes[inside], strata[inside], wanted, seed, "folds")]
    return choice[np.searchsorted(members, groups[pool])] + 1


def patient_groups(dataset: Dataset) -> np.ndarray:
    """int64 [N]: images with equal numbers belong to one patient; each image its own where none is known."""
    if dataset.patient is None:
        return np.arange(len(dataset))
    return np.unique(dataset.patient, return_inverse=True)[1].reshape(-1).astype(np.int64)


def kept_together(dataset: Dataset) -> np.ndarray:
    """int64 [N]: the groups of patients, in which images that are the same join their patients."""
    groups = patient_groups(dataset)
    if dataset.twins is None:
        return groups
    place = {int(one): i for i, one in reversed([*enumerate(dataset.twins.tolist())])}
    joined = groups.copy()
    for i, twin in enumerate(dataset.twins.tolist()):
        one, other = joined[i], joined[place[twin]]
        if one != other:
            joined[joined == max(one, other)] = min(one, other)
    return joined


def _fixed_by_source(dataset: Dataset, groups: np.ndarray) -> np.ndarray:
    """The split each image is fixed to, "" where validation and test may still be carved out."""
    assigned = np.full(len(dataset), "", dtype="<U10")
    if dataset.split is None:
        return assigned
    if unknown := sorted(set(np.unique(dataset.split)) - {*SPLITS, ""}):
        raise BadInput(f"data.split: unknown split '{unknown[0]}'; use train, validation, test or leave it empty")
    _refuse_torn_patients(dataset, groups)
    for name in ("validation", "test"):
        held_out = np.isin(groups, groups[dataset.split == name])
        assigned[held_out] = name
    if not (assigned == "").any():
        raise BadInput("data.split: no image is left for training; mark some as 'train'")
    return assigned


def _refuse_torn_patients(dataset: Dataset, groups: np.ndarray) -> None:
    assert dataset.split is not None
    named = dataset.split != ""
    pairs = np.unique(np.stack([groups[named], _number(dataset.split[named])]), axis=1)
    patients, counts = np.unique(pairs[0], return_counts=True)
    torn = patients[counts > 1]
    if len(torn):
        assert dataset.patient is not None
        example = dataset.patient[np.flatnonzero(groups == torn[0])[0]]
        raise BadInput(
            f"data.split: {len(torn)} patients are in more than one split (for example {example}); "
            "drop the split column to split by patient, or drop the patient column if you mean it"
        )


def _number(values: np.ndarray) -> np.ndarray:
    return np.unique(values, return_inverse=True)[1].reshape(-1)


def _carve(
    dataset: Dataset, groups: np.ndarray, pool: np.ndarray, shares: dict[str, float], seed: int, address: str
) -> np.ndarray:
    """The split of each image of `pool`: a share of the patients of every stratum, and "train" for the rest."""
    shares = {"train": 1 - sum(shares.values()), **{name: share for name, share in shares.items() if share > 0}}
    if shares["train"] <= 0:
        raise BadInput("data.validation + data.test leave nothing to train on; make them sum to less than 1")
    members, first, sizes = np.unique(groups[pool], return_index=True, return_counts=True)
    strata = _strata(dataset, groups, pool, first)
    choice = _deal(sizes, strata, np.array(list(shares.values())), seed, address)
    return np.array(list(shares))[choice[np.searchsorted(members, groups[pool])]]


def _deal(sizes: np.ndarray, strata: np.ndarray, wanted: np.ndarray, seed: int, address: str) -> np.ndarray:
    """int64 per patient, an index into `wanted` (shares that sum to 1); `sizes` are the patients' numbers of images.

    Stratum by stratum, each patient goes where most are missing. What is missing is carried from one stratum to the
    next, so that rare classes do not tilt the sizes.
    """
    choice = np.zeros(len(sizes), dtype=np.int64)
    missing = np.zeros(len(wanted))
    for stratum in np.unique(strata):
        inside = np.flatnonzero(strata == stratum)
        order = numpy_rng(seed, address, int(stratum)).permutation(inside)
        missing += wanted * sizes[inside].sum()
        for group in order:
            choice[group] = missing.argmax()
            missing[choice[group]] -= sizes[group]
    return choice


def _strata(dataset: Dataset, groups: np.ndarray, pool: np.ndarray, first: np.ndarray) -> np.ndarray:
    """int64 per patient of the pool: patients of one institution with alike labels share a number."""
    position = _number(groups[pool])
    kinds = _label_strata(dataset.labels[pool], position)
    if dataset.site is None:
        return kinds
    return _number(dataset.site[pool][first]) * (kinds.max() + 1) + kinds


def _label_strata(labels: np.ndarray, position: np.ndarray) -> np.ndarray:
    """The most severe class of each patient, or the decile of the mean value."""
    count = position.max() + 1
    if np.issubdtype(labels.dtype, np.integer):
        top = np.zeros(count, dtype=np.int64)
        np.maximum.at(top, position, labels)
        return top
    means = np.bincount(position, weights=labels) / np.bincount(position)
    edges = np.quantile(means, np.linspace(0, 1, AGE_STRATA + 1)[1:-1])
    return np.searchsorted(edges, means, side="right").astype(np.int64)


# --- balanced test images -------------------------------------------------------------------------------------


#: test images of each class at a site: a number, or as many as the site has of its rarest class
PerClass = Annotated[int, Field(ge=1)] | Literal["equal"]


def balanced(
    dataset: Dataset, where: dict[str, dict[str, np.ndarray]], per_class: PerClass, seed: int
) -> dict[str, dict[str, np.ndarray]]:
    """The images of each split of each site, their test images chosen so. Test images that are too many are left out of
    the study: their patients must not train."""
    return {
        site: {**splits, "test": _chosen(dataset, splits["test"], site, per_class, seed, "test_per_class")}
        for site, splits in where.items()
    }


def balanced_total(dataset: Dataset, index: np.ndarray, per_class: int, seed: int) -> np.ndarray:
    """`per_class` of the test images `index` for each class, before they are spread over sites."""
    return _chosen(dataset, index, "all sites", per_class, seed, "test_total_per_class")


def _chosen(dataset: Dataset, index: np.ndarray, who: str, per_class: PerClass, seed: int, setting: str) -> np.ndarray:
    """As many test images of each class as `who`, a site or all of them, shall have."""
    if not dataset.classes:
        raise BadInput(f"data.{setting}: the labels are values and have no classes; leave it out")
    of_class = [index[dataset.labels[index] == number] for number in range(len(dataset.classes))]
    rarest = min(range(len(of_class)), key=lambda number: len(of_class[number]))
    wanted = max(1, len(of_class[rarest])) if per_class == "equal" else per_class
    if len(of_class[rarest]) < wanted:
        has = "there are" if who == "all sites" else f"site '{who}' has"
        raise BadInput(
            f"data.{setting}: {has} {len(of_class[rarest])} test images of class '{dataset.classes[rarest]}', and "
            f"{wanted} are wanted; raise data.test, or leave the setting out"
        )
    rngs = [numpy_rng(seed, "balanced test", who, number) for number in range(len(of_class))]
    return np.sort(np.concatenate([rng.permutation(own)[:wanted] for rng, own in zip(rngs, of_class, strict=True)]))
