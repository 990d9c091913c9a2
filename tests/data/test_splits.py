"""Splits keep patients whole, follow the shares, and are the same wherever they are made."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyclinic.data.dataset import SPLITS, Dataset, Fold, balanced, balanced_total, split
from polyclinic.data.parts import open_site, prepare
from polyclinic.errors import BadInput
from polyclinic.study import parse_study


def dataset(labels, **columns) -> Dataset:
    labels = np.asarray(labels)
    classes = ("a", "b", "c") if np.issubdtype(labels.dtype, np.integer) else ()
    return Dataset(np.zeros((len(labels), 1, 16, 16), np.uint8), labels, classes, **columns)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(12, 60), st.integers(0, 5), st.booleans())
def test_patients_stay_whole_and_shares_are_kept(per_patient, patients, seed, ages):
    rng = np.random.default_rng(seed)
    patient = rng.permutation(np.repeat(np.arange(patients), per_patient))
    labels = rng.uniform(1, 200, len(patient)).astype(np.float32) if ages else rng.integers(0, 3, len(patient))
    parts = split(dataset(labels, patient=patient), validation=0.2, test=0.3, seed=seed)
    assert sorted(np.concatenate(list(parts.values()))) == list(range(len(patient)))
    owners = [set(patient[parts[name]]) for name in SPLITS]
    assert sum(map(len, owners)) == patients
    for name, share in zip(SPLITS, (0.5, 0.2, 0.3), strict=True):
        assert abs(len(parts[name]) - share * len(patient)) <= 2 * per_patient


def test_classes_ages_and_natural_sites_are_split_alike():
    labels = np.repeat([0, 1, 2], [500, 100, 20])
    parts = split(dataset(labels), validation=0.1, test=0.25, seed=3)
    assert np.abs(np.bincount(labels[parts["test"]]) - [125, 25, 5]).max() <= 1
    assert np.abs(np.bincount(labels[parts["validation"]]) - [50, 10, 2]).max() <= 1
    ages = np.random.default_rng(0).uniform(1, 228, 2000).astype(np.float32)
    parts = split(dataset(ages), validation=0.15, test=0.2, seed=0)
    for decile in np.linspace(0.1, 0.9, 9):
        assert abs(np.quantile(ages[parts["test"]], decile) - np.quantile(ages, decile)) < 5
    site = np.repeat(["big", "small"], [900, 20])
    labels = np.tile([0, 1], 460)
    parts = split(dataset(labels, site=site), validation=0.1, test=0.2, seed=0)
    assert abs((site[parts["test"]] == "small").sum() - 4) <= 1


def test_splits_and_folds_are_pinned():
    """Same seed, same split, on any machine: these numbers must not change."""
    parts = split(dataset(np.tile([0, 1], 10)), validation=0.2, test=0.2, seed=7)
    assert {name: index.tolist() for name, index in parts.items()} == PINNED
    other = split(dataset(np.tile([0, 1], 10)), validation=0.2, test=0.2, seed=8)
    assert other["test"].tolist() != parts["test"].tolist()
    parts = split(dataset(np.tile([0, 1], 10)), validation=0.2, test=0.2, seed=7, fold=Fold(2, 4))
    assert {name: index.tolist() for name, index in parts.items()} == PINNED_FOLD


def test_a_split_that_the_source_fixes_is_kept_and_followed():
    fixed = np.array(["train"] * 80 + ["test"] * 20)
    parts = split(dataset(np.tile([0, 1], 50), split=fixed), validation=0.25, test=0.5, seed=0)
    assert parts["test"].tolist() == list(range(80, 100))
    assert len(parts["validation"]) == 20
    assert len(parts["train"]) == 60
    fixed = np.array(["test", "", "train", "", "train", "", "train", ""])
    patient = np.array([1, 1, 2, 2, 3, 3, 4, 4])
    parts = split(dataset(np.zeros(8, np.int64), split=fixed, patient=patient), validation=0.3, test=0.2, seed=0)
    assert parts["test"].tolist() == [0, 1]
    assert len(parts["validation"]) == 2


@pytest.mark.parametrize(
    ("data", "shares", "words"),
    [
        (
            {"split": ["train", "test", "train", "train"], "patient": ["ann", "ann", "bob", "eve"]},
            (0, 0.5),
            r"1 patients are in more than one split \(for example ann\)",
        ),
        ({"split": ["dev", "train", "", ""]}, (0, 0.5), "unknown split 'dev'"),
        ({}, (0.5, 0.5), "leave nothing to train on"),
        ({}, (0, 0.1), "the test split is empty"),
    ],
)
def test_impossible_splits_are_refused(data, shares, words):
    columns = {name: np.array(values) for name, values in data.items()}
    with pytest.raises(BadInput, match=words):
        split(dataset([0, 1, 0, 1], **columns), validation=shares[0], test=shares[1], seed=0)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(2, 6),
    images=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(0, 2)), min_size=12, max_size=60),
    seed=st.integers(0, 5),
    ages=st.booleans(),
    official=st.booleans(),
)
def test_folds_cover_every_image_once_and_keep_patients_and_sites(count, images, seed, ages, official):
    """`images`: institution, number of images and class of each patient."""
    sites, sizes, classes = (np.array(column) for column in zip(*images, strict=True))
    patient = np.repeat(np.arange(len(sizes)), sizes)
    order = np.random.default_rng(seed).permutation(len(patient))
    patient, site = patient[order], np.array(["a", "b", "c"])[sites[patient[order]]]
    labels = (10.0 * classes[patient] + patient).astype(np.float32) if ages else classes[patient]
    named = np.where(np.arange(len(patient)) == 0, "test", "train") if official else None
    data = dataset(labels, patient=patient, site=site, split=named)
    parts = [split(data, validation=0.1, test=0.5, seed=seed, fold=Fold(k, count)) for k in range(1, count + 1)]
    assert sorted(np.concatenate([part["test"] for part in parts])) == list(range(len(patient)))
    for part in parts:
        assert sorted(np.concatenate(list(part.values()))) == list(range(len(patient)))
        owners = [set(patient[part[name]]) for name in SPLITS]
        assert sum(map(len, owners)) == len(sizes)
        assert all(len(part[name]) for name in SPLITS)
        for name, patients in zip("abc", np.bincount(sites, minlength=3), strict=True):
            if patients >= count:  # every institution is tested in every fold
                assert name in site[part["test"]]


def test_folds_are_equal_in_size_and_in_classes_and_validation_is_a_share_of_all():
    labels = np.tile(np.repeat([0, 1], [80, 20]), 3)
    site = np.repeat(["a", "b", "c"], 100)
    for number in range(1, 6):
        parts = split(dataset(labels, site=site), validation=0.16, test=0.9, seed=1, fold=Fold(number, 5))
        assert [len(parts[name]) for name in SPLITS] == [192, 48, 60]
        assert np.bincount(labels[parts["test"]]).tolist() == [48, 12]
        assert all((site[parts["test"]] == name).sum() == 20 for name in "abc")


@pytest.mark.parametrize("fold", [None, Fold(2, 4)])
def test_folds_of_a_search_leave_the_test_images_alone_and_cover_the_rest(fold):
    patient, site = np.repeat(np.arange(40), 2), np.repeat(["a", "b"], 40)
    data = dataset(np.repeat(np.tile([0, 1], 20), 2), patient=patient, site=site)
    shares = {"validation": 0.1, "test": 0.25, "seed": 3, "fold": fold}
    whole = split(data, **shares)
    parts = [split(data, **shares, tuning_fold=Fold(number, 3)) for number in (1, 2, 3)]
    assert all(part["test"].tolist() == whole["test"].tolist() for part in parts)
    held_out = np.concatenate([part["validation"] for part in parts])
    assert sorted(held_out) == sorted(np.concatenate([whole["train"], whole["validation"]]))
    for part in parts:
        assert not set(patient[part["train"]]) & set(patient[part["validation"]])
        assert set(site[part["validation"]]) == {"a", "b"}


def test_folds_that_cannot_be_are_refused():
    with pytest.raises(BadInput, match="5 folds need as many patients, and there are 4"):
        split(dataset([0, 1, 0, 1]), validation=0, test=0.2, seed=0, fold=Fold(1, 5))
    with pytest.raises(BadInput, match="leave nothing to train on"):
        split(dataset([0, 1] * 20), validation=0.6, test=0.2, seed=0, fold=Fold(1, 2))
    for text in ("2", "0/5", "6/5", "1/1", "a/b", "1/5/2", "-1/5", ""):
        with pytest.raises(ValueError, match="fold"):
            Fold.parse(text)
    assert Fold.parse("02/5") == Fold(2, 5)


PINNED_FOLD = {
    "train": [1, 4, 5, 6, 8, 9, 10, 13, 16, 18, 19],
    "validation": [2, 14, 15, 17],
    "test": [0, 3, 7, 11, 12],
}
PINNED = {"train": [0, 1, 2, 3, 4, 6, 9, 13, 15, 16, 18, 19], "validation": [5, 7, 8, 10], "test": [11, 12, 14, 17]}


LABELS = np.array([0] * 30 + [1] * 6 + [0] * 3 + [1] * 11)
DATA = Dataset(np.zeros((50, 1, 16, 16), np.uint8), LABELS, ("no", "yes"))
#: at site a 15 and 3 test images of the two classes, at site b 1 and 5
WHERE = {
    "a": {"train": np.arange(15), "validation": np.array([], int), "test": np.r_[15:30, 30:33]},
    "b": {"train": np.r_[33:36, 40:44], "validation": np.array([39]), "test": np.r_[36:37, 44:49]},
}


def counts(where):
    return {site: np.bincount(LABELS[splits["test"]], minlength=2).tolist() for site, splits in where.items()}


def test_as_many_as_of_the_rarest_class_and_the_rest_is_left_out():
    found = balanced(DATA, WHERE, "equal", 0)
    assert counts(found) == {"a": [3, 3], "b": [1, 1]}
    for site, splits in found.items():
        assert set(splits["test"]) <= set(WHERE[site]["test"])
        for name in ("train", "validation"):
            assert splits[name] is WHERE[site][name]
    again, other = balanced(DATA, WHERE, "equal", 0), balanced(DATA, WHERE, "equal", 1)
    assert all(np.array_equal(again[site]["test"], found[site]["test"]) for site in found)
    assert not np.array_equal(other["a"]["test"], found["a"]["test"])


def test_a_number_of_each_class_at_a_site_and_at_all_sites_together():
    assert counts(balanced(DATA, {"a": WHERE["a"]}, 2, 0)) == {"a": [2, 2]}
    test = np.r_[15:33, 36:37, 44:49]
    found = balanced_total(DATA, test, 5, 0)
    assert np.bincount(LABELS[found]).tolist() == [5, 5]
    assert set(found) <= set(test)
    assert len(set(found)) == 10
    assert not np.array_equal(found, balanced_total(DATA, test, 5, 1))


VALUES = Dataset(np.zeros((4, 1, 16, 16), np.uint8), np.arange(4, dtype=np.float32), (), unit="years")


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (lambda: balanced(DATA, {"a": WHERE["a"]}, 4, 0), "site 'a' has 3 test images of class 'yes', and 4"),
        (lambda: balanced_total(DATA, np.r_[15:33, 36:37, 44:49], 9, 0), "8 test images of class 'yes', and 9"),
        (
            lambda: balanced(DATA, {"a": {**WHERE["a"], "test": np.arange(15, 30)}}, "equal", 0),
            "site 'a' has 0 test images of class 'yes', and 1",
        ),
        (lambda: balanced(VALUES, {"a": {"test": np.arange(4)}}, "equal", 0), "the labels are values"),
    ],
)
def test_images_that_are_not_there_are_refused(attempt, words):
    with pytest.raises(BadInput, match=words):
        attempt()


def test_a_study_has_balanced_test_sets_and_the_same_training_images(tmp_path):
    def prepared(**more):
        data = {"source": "fundus-phantom", "size": 28, "samples": 90, "test": 0.4, **more}
        sites = {"partition": "label-skew", "count": 2, "target_ks": 0.3}
        study = parse_study({"data": data, "sites": sites, "method": {"name": "fedavg"}})
        return prepare(study.data, study.sites, cache=tmp_path)

    plain, equal, total = prepared(), prepared(test_per_class="equal"), prepared(test_total_per_class=7)
    in_all = np.sum([one["test"] for one in total.info["class_counts"].values()], axis=0)
    assert in_all.tolist() == [7] * len(in_all)
    assert total.info["digests"]["train"] == plain.info["digests"]["train"]
    for site in plain.names:
        before, after = (one.info["class_counts"][site] for one in (plain, equal))
        assert after["test"] == [min(before["test"])] * len(before["test"])
        assert all(after[name] == before[name] for name in ("train", "validation"))
        labels = open_site(equal.folder, site).test.labels
        assert np.bincount(labels).tolist() == after["test"]
    assert plain.info["digests"]["train"] == equal.info["digests"]["train"]
    with pytest.raises(BadInput, match=r"data\.test_per_class"):
        prepared(test_per_class="half")


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "most"])
def test_a_number_that_is_none_is_refused_in_one_sentence(tiny, value):
    with pytest.raises(BadInput, match=r"^data\.test_per_class: must be a whole number"):
        tiny("fedavg", {"data.test_per_class": value})


@pytest.mark.parametrize("setting", ["test_per_class", "test_total_per_class"])
def test_values_have_no_classes_to_balance(tiny, setting):
    hands = {"data.source": "hand-phantom", "task": {"name": "regression"}, f"data.{setting}": 2}
    with pytest.raises(BadInput, match=rf"^data\.{setting}: the labels of regression are values"):
        tiny("fedavg", hands)
