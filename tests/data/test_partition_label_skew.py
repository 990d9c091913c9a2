"""Label skew reaches its target at equal sizes, or says in one sentence what it can reach."""

import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from polyclinic.data.dataset import Dataset
from polyclinic.data.labels import label_histograms, mean_ks, pairwise_ks
from polyclinic.data.partitions import PARTITIONS, assign_to_sites
from polyclinic.errors import BadInput

LabelSkew = PARTITIONS["label-skew"]


def labelled(labels, classes=0):
    names = tuple(str(c) for c in range(classes))
    return Dataset(np.zeros((len(labels), 1, 1, 1), dtype=np.uint8), labels, classes=names)


def ks_of(data, parts, split="train"):
    return mean_ks({site: data.labels[part[split]] for site, part in parts.items()})


def sizes_of(parts, split="train"):
    return [len(part[split]) for part in parts.values()]


def ages(n, seed=0):
    return np.clip(np.random.default_rng(seed).normal(127, 41, n), 1, 228).astype(np.float32)


@pytest.mark.parametrize("target", [0, 0.40, 0.61])
def test_the_papers_retina_splits(target):
    data = labelled(np.random.default_rng(0).integers(2, size=9000), classes=2)
    where = {"train": np.arange(6000), "validation": np.arange(6000, 7000), "test": np.arange(7000, 9000)}
    parts = assign_to_sites(LabelSkew(count=4, target_ks=target), data, where, seed=0)
    assert ks_of(data, parts) == pytest.approx(target, abs=0.02)
    assert sizes_of(parts) == [1500] * 4
    # what is not for training follows the training parts
    assert ks_of(data, parts, "test") == pytest.approx(target, abs=0.04)
    assert sizes_of(parts, "test") == pytest.approx([500] * 4, abs=2)


@pytest.mark.parametrize("target", [0.02, 0.63, 0.97])
def test_the_papers_bone_age_splits(target):
    data = labelled(ages(6800))
    parts = assign_to_sites(LabelSkew(count=4, target_ks=target), data, {"train": np.arange(6800)}, seed=0)
    assert ks_of(data, parts) == pytest.approx(target, abs=0.02)
    assert sizes_of(parts) == [1700] * 4


def test_the_first_site_has_the_lowest_labels_and_the_impossible_is_said():
    data = labelled(ages(1000))
    parts = assign_to_sites(LabelSkew(count=4, target_ks=0.5), data, {"train": np.arange(1000)}, seed=0)
    means = [data.labels[part["train"]].mean() for part in parts.values()]
    assert means == sorted(means)
    data = labelled(np.repeat([0, 1], 200), classes=2)
    with pytest.raises(BadInput) as refusal:
        assign_to_sites(LabelSkew(count=4, target_ks=0.9), data, {"train": np.arange(400)}, seed=0)
    assert str(refusal.value) == (
        "sites.target_ks: 0.9 cannot be reached within 0.02 with these 400 labels on 4 equal sites, "
        "whose range is 0.00 to 0.67; the nearest is 0.67"
    )


def reachable(data, count, seed=0):
    """The lowest and the highest KS that the partition can reach, read from its refusals of 0 and 1."""
    ends = []
    for place, target in enumerate((0.0, 1.0)):
        try:
            assign_to_sites(LabelSkew(count=count, target_ks=target), data, {"train": np.arange(len(data))}, seed=seed)
            ends.append(target)
        except BadInput as refusal:
            found = re.fullmatch(r"sites.target_ks: [01] .* range is (\d\.\d\d) to (\d\.\d\d); .*", str(refusal))
            ends.append(float(found.groups()[place]))
    return tuple(ends)


@example(n=250, count=4, balance=[0.875, 0.5, 0.25, 1.0, 0.875], where=0.0, seed=10)  # 1 is in reach and 0 is not
@given(
    n=st.integers(250, 1500),
    count=st.integers(2, 8),
    balance=st.lists(st.floats(0.05, 1), min_size=2, max_size=6),
    where=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_any_target_in_reach_is_reached_for_classes(n, count, balance, where, seed):
    shares = np.array(balance) / np.sum(balance)
    data = labelled(np.random.default_rng(seed).choice(len(shares), n, p=shares), classes=len(shares))
    low, high = reachable(data, count, seed)
    target = low + where * (high - low)
    parts = assign_to_sites(LabelSkew(count=count, target_ks=target), data, {"train": np.arange(n)}, seed=seed)
    assert ks_of(data, parts) == pytest.approx(target, abs=0.02)
    assert max(sizes_of(parts)) - min(sizes_of(parts)) <= 1
    assert sorted(np.concatenate([part["train"] for part in parts.values()])) == list(range(n))


@given(
    n=st.integers(250, 1500),
    count=st.integers(2, 8),
    target=st.floats(0.05, 1),
    rounding=st.sampled_from([0, 6, 12]),
    seed=st.integers(0, 1000),
)
def test_any_target_is_reached_for_ages(n, count, target, rounding, seed):
    labels = ages(n, seed)
    if rounding:  # whole or half years, as readers estimate them: many equal labels
        labels = (labels // rounding * rounding).astype(np.float32)
    data = labelled(labels)
    low, high = reachable(data, count, seed)
    target = min(max(target, low), high)
    parts = assign_to_sites(LabelSkew(count=count, target_ks=target), data, {"train": np.arange(n)}, seed=seed)
    assert ks_of(data, parts) == pytest.approx(target, abs=0.02)
    assert max(sizes_of(parts)) - min(sizes_of(parts)) <= 1


@given(count=st.integers(2, 9), share=st.floats(0.02, 0.98), n=st.integers(300, 900))
def test_no_two_class_partition_beats_the_stated_maximum(count, share, n):
    """Differences are convex in the shares, so their sum is largest where all sites but one are pure."""
    ones = round(share * n)
    data = labelled((np.arange(n) < ones).astype(np.int64), classes=2)
    full = np.clip(ones * count / n - np.arange(count), 0, 1)  # class shares of the sites, filled one by one
    best = np.mean([abs(a - b) for i, a in enumerate(full) for b in full[:i]])
    assert reachable(data, count)[1] == pytest.approx(best, abs=0.02)


@pytest.mark.parametrize(("count", "n"), [(1, 100), (5, 3)])
def test_too_few_sites_or_images(count, n):
    data = labelled(np.zeros(n, dtype=np.int64), classes=1)
    with pytest.raises(BadInput, match=r"^sites.target_ks: needs at least two sites"):
        assign_to_sites(LabelSkew(count=count), data, {"train": np.arange(n)}, seed=0)


def test_differences_of_labels_by_hand():
    sites = {"a": np.array([0, 0, 0, 1]), "b": np.array([0, 1, 1, 1]), "c": np.array([0, 0, 1, 1])}
    expected = [[0, 0.5, 0.25], [0.5, 0, 0.25], [0.25, 0.25, 0]]
    np.testing.assert_allclose(pairwise_ks(sites), expected)
    assert mean_ks(sites) == pytest.approx((0.5 + 0.25 + 0.25) / 3)
    assert label_histograms({"a": np.array([0, 2, 2]), "b": np.array([1])}, 3) == {
        "edges": None,
        "per_site": {"a": [1, 0, 2], "b": [0, 1, 0]},
    }
    found = label_histograms({"a": np.array([0.0, 24.0]), "b": np.array([1.5])}, 0)
    assert found["edges"] == pytest.approx(list(range(25)))
    assert found["per_site"]["a"] == [1, *[0] * 22, 1]
    assert found["per_site"]["b"] == [0, 1, *[0] * 22]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1.0, 2.0], [3.0, 9.0], 1),
        ([1.0, 3.0], [2.0, 4.0], 0.5),  # cumulative shares at 1, 2, 3, 4: 1/2, 1/2, 1, 1 against 0, 1/2, 1/2, 1
        ([0, 1, 2], [2, 1, 0], 0),
    ],
)
def test_the_largest_gap_counts(first, second, expected):
    assert mean_ks({"a": np.array(first), "b": np.array(second)}) == expected
    assert mean_ks({"only": np.array(first)}) == 0


@pytest.mark.parametrize("rounding", [0, 1])
def test_scipy_agrees(rounding):
    rng = np.random.default_rng(0)
    sites = {str(k): rng.normal(k / 2, 1 + k, 50 + 7 * k).round(rounding) for k in range(4)}
    for i, one in enumerate(sites.values()):
        for j, other in enumerate(sites.values()):
            assert pairwise_ks(sites)[i, j] == pytest.approx(ks_2samp(one, other).statistic)
