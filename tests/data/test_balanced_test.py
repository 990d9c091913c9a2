"""Balanced test sets: as many images of each class at every site, drawn by address, and nothing else changed."""

import numpy as np
import pytest

from polyclinic.data.dataset import Dataset, balanced, balanced_total
from polyclinic.data.parts import open_site, prepare
from polyclinic.errors import BadInput
from polyclinic.study import parse_study

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


def test_a_number_of_each_class():
    only = {"a": WHERE["a"]}
    assert counts(balanced(DATA, only, 2, 0)) == {"a": [2, 2]}
    with pytest.raises(
        BadInput, match=r"site 'a' has 3 test images of class 'yes', and 4 are wanted; raise data\.test"
    ):
        balanced(DATA, only, 4, 0)


def test_a_number_of_each_class_at_all_sites_together():
    test = np.r_[15:33, 36:37, 44:49]
    found = balanced_total(DATA, test, 5, 0)
    assert np.bincount(LABELS[found]).tolist() == [5, 5]
    assert set(found) <= set(test)
    assert len(set(found)) == 10
    assert not np.array_equal(found, balanced_total(DATA, test, 5, 1))
    with pytest.raises(BadInput, match=r"there are 8 test images of class 'yes', and 9 are wanted; raise data\.test"):
        balanced_total(DATA, test, 9, 0)


def test_a_site_without_a_class_has_no_balanced_test():
    lacking = {"a": {**WHERE["a"], "test": np.arange(15, 30)}}
    with pytest.raises(BadInput, match="site 'a' has 0 test images of class 'yes', and 1 are wanted"):
        balanced(DATA, lacking, "equal", 0)


def test_values_have_no_classes():
    values = Dataset(np.zeros((4, 1, 16, 16), np.uint8), np.arange(4, dtype=np.float32), (), unit="years")
    with pytest.raises(BadInput, match="the labels are values"):
        balanced(values, {"a": {"test": np.arange(4)}}, "equal", 0)


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
        assert {name: after[name] for name in ("train", "validation")} == {
            n: before[n] for n in ("train", "validation")
        }
        labels = open_site(equal.folder, site).test.labels
        assert np.bincount(labels).tolist() == after["test"]
    assert plain.info["digests"]["train"] == equal.info["digests"]["train"]
    with pytest.raises(BadInput, match=r"data\.test_per_class"):
        prepared(test_per_class="half")


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "most"])
def test_a_number_that_is_none_is_refused_in_one_sentence(tiny, value):
    with pytest.raises(
        BadInput, match=r"^data\.test_per_class: must be a whole number of 1 or more, or equal \(it is "
    ):
        tiny("fedavg", {"data.test_per_class": value})


@pytest.mark.parametrize("setting", ["test_per_class", "test_total_per_class"])
def test_values_have_no_classes_to_balance(tiny, setting):
    hands = {"data.source": "hand-phantom", "task": {"name": "regression"}, f"data.{setting}": 2}
    with pytest.raises(BadInput, match=rf"^data\.{setting}: the labels of regression are values"):
        tiny("fedavg", hands)
