"""Train, validation and test: by patient where there is one, stratified, fixed by the seed on any machine.

Splits are made before sites are, so that a patient who is in the training data of one site cannot be in the
test data of another.
"""

from __future__ import annotations

import numpy as np

from polyclinic.data.dataset import Dataset
from polyclinic.errors import BadInput
from polyclinic.randomness import numpy_rng

SPLITS = ("train", "validation", "test")
AGE_STRATA = 10


def split(dataset: Dataset, *, validation: float, test: float, seed: int) -> dict[str, np.ndarray]:
    """Indices (int64, ascending) of the images of each split.

    A split that the source fixes is kept. A split that it leaves out is carved, by patient, out of the images
    that it calls "train" or does not call anything; `validation` and `test` are shares of those images.
    """
    groups = patient_groups(dataset)
    assigned = _fixed_by_source(dataset, groups)
    pool = assigned == ""
    shares = {name: share for name, share in (("validation", validation), ("test", test)) if name not in assigned}
    assigned[pool] = _carve(dataset, groups, np.flatnonzero(pool), shares, seed)
    result = {name: np.flatnonzero(assigned == name) for name in SPLITS}
    _refuse_empty(result, validation)
    return result


def patient_groups(dataset: Dataset) -> np.ndarray:
    """int64 [N]: images with equal numbers belong to one patient; each image its own where none is known."""
    if dataset.patient is None:
        return np.arange(len(dataset))
    return np.unique(dataset.patient, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _fixed_by_source(dataset: Dataset, groups: np.ndarray) -> np.ndarray:
    """The split each image is fixed to, "" where validation and test may still be carved out."""
    assigned = np.full(len(dataset), "", dtype="<U10")
    if dataset.split is None:
        return assigned
    unknown = sorted(set(np.unique(dataset.split)) - {*SPLITS, ""})
    if unknown:
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


def _carve(dataset: Dataset, groups: np.ndarray, pool: np.ndarray, shares: dict[str, float], seed: int) -> np.ndarray:
    """The split of each image of `pool`: stratum by stratum, each patient goes where most are missing.

    What is missing is carried from one stratum to the next, so that rare classes do not tilt the sizes.
    """
    shares = {
        "train": 1 - sum(shares.values()),
        **{name: share for name, share in shares.items() if share > 0},
    }
    if shares["train"] <= 0:
        raise BadInput("data.validation + data.test leave nothing to train on; make them sum to less than 1")
    names, wanted = list(shares), np.array(list(shares.values()))
    members, first, sizes = np.unique(groups[pool], return_index=True, return_counts=True)
    strata = _strata(dataset, groups, pool, first)
    choice = np.zeros(len(members), dtype=np.int64)
    missing = np.zeros(len(names))
    for stratum in np.unique(strata):
        inside = np.flatnonzero(strata == stratum)
        order = numpy_rng(seed, "split", int(stratum)).permutation(inside)
        missing += wanted * sizes[inside].sum()
        for group in order:
            choice[group] = missing.argmax()
            missing[choice[group]] -= sizes[group]
    return np.array(names)[choice[np.searchsorted(members, groups[pool])]]


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


def _refuse_empty(result: dict[str, np.ndarray], validation: float) -> None:
    for name, index in result.items():
        if len(index) == 0 and (name != "validation" or validation > 0):
            raise BadInput(f"data: the {name} split is empty; use more patients or other shares of validation and test")
