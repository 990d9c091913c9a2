"""Noised scores: arithmetic by hand, what one image can change, and sums that a coordinator takes."""

from __future__ import annotations

import math

import pytest
import torch

from polyclinic.metrics.roc import auc_from_counts
from polyclinic.tasks.classification import BINS, Classification, cells_of
from polyclinic.tasks.regression import Regression
from polyclinic.tasks.task import Target, nearest_counts, whole_counts

AGES = Target(unit="months", label_range=(0.0, 200.0))
TWO, THREE = Target(classes=("a", "b")), Target(classes=("a", "b", "c"))


def no_noise(like):
    return torch.zeros_like(like)


def ones(like):
    return torch.ones_like(like)


def sums_of(task, outputs, labels, target):
    targets = task.targets(torch.tensor(labels))
    observed = task.near(task.observe(torch.tensor(outputs), targets, target), targets, target)
    return task.sums(observed, targets, None, target)


def draws(seed, scale):
    rng = torch.Generator().manual_seed(seed)
    return lambda like: scale * torch.randn(like.shape, generator=rng, dtype=like.dtype)


# --- regression ---------------------------------------------------------------------------------------


def test_errors_of_ages_by_hand():
    """Predictions 110 and 190 for 100 and 40: errors 10 and 150, which counts as 50, a quarter of the range."""
    task = Regression()
    sums = sums_of(task, [[0.1], [0.9]], [100.0, 40.0], AGES)
    assert float(sums["absolute_error"]) == pytest.approx(60)
    assert float(sums["squared_error"]) == pytest.approx(100 + 2500)
    told = task.noised(sums, no_noise, AGES)
    assert task.finish(told) == pytest.approx({"mae": 30, "rmse": math.sqrt(1300), "loss": 0.3})


def test_noise_of_ages_by_hand():
    """One unit of noise is sqrt(2) of the largest errors, 50 and 2,500."""
    told = Regression().noised(sums_of(Regression(), [[0.1]] * 8, [100.0] * 8, AGES), ones, AGES)
    assert float(told["absolute_error"]) == pytest.approx(80 + math.sqrt(2) * 50)
    assert float(told["squared_error"]) == pytest.approx(800 + math.sqrt(2) * 2500)
    assert int(told["count"]) == 8


def test_one_image_moves_ages_by_less_than_one_unit_of_noise():
    """In units of the noise, sqrt(2) of each largest error, the vector of any image has at most length 1."""
    for output in (-1e9, -1.0, 0.0, 0.3, 1e9, math.inf, math.nan):
        sums = sums_of(Regression(), [[output]], [70.0], AGES)
        vector = [float(sums["absolute_error"]) / 50, float(sums["squared_error"]) / 2500]
        assert math.hypot(*vector) / math.sqrt(2) <= 1 + 1e-9


@pytest.mark.parametrize("criterion", ["l1", "mse", "huber"])
def test_the_loss_follows_from_the_errors(criterion):
    task = Regression(criterion=criterion)
    sums = sums_of(task, [[0.1], [-0.2], [0.05]], [100.0, 80.0, 150.0], AGES)
    assert task.finish(task.noised(sums, no_noise, AGES))["loss"] == pytest.approx(task.finish(sums)["loss"], rel=0.3)


# --- classification -----------------------------------------------------------------------------------


def test_counts_of_two_classes_by_hand():
    """Without noise the matrix is as it was; the histograms of the first class mirror those of the second."""
    task = Classification()
    sums = sums_of(task, [[0.0, 2.0], [1.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [1, 1, 0, 0], TWO)
    told = task.noised(sums, no_noise, TWO)
    assert told["confusion"].tolist() == sums["confusion"].tolist() == [[1, 1], [1, 1]]
    assert torch.equal(told["histograms"][0, 0], told["histograms"][1, 1].flip(0))
    rest, own = told["histograms"][1]
    assert auc_from_counts(own, rest) == pytest.approx(3 / 4)  # margins 2 and -1 against 1 and -3
    task.check_sums(told, TWO)


def test_noise_of_two_classes_by_hand():
    """An image is in one cell of the matrix and one of a histogram: length sqrt(2). The same noise on all four cells of
    the matrix is taken off again, as they add up to the four images."""
    task, asked = Classification(), []

    def first_cell(like):
        asked.append(like.shape)
        return torch.nn.functional.one_hot(torch.tensor(0), like.numel()).reshape(like.shape).double()

    sums = sums_of(task, [[0.0, 2.0]] * 20 + [[2.0, 0.0]] * 20, [1] * 20 + [0] * 20, TWO)
    told = task.noised(sums, lambda like: 4 * first_cell(like), TWO)
    assert [tuple(shape) for shape in asked] == [(4,), (1, 2, 16)]
    # 20 + 4 sqrt(2) and 20, which are 45.66 together: 2.83 less for each; then whole
    assert told["confusion"].tolist() == [[23, 0], [0, 17]]


@pytest.mark.parametrize("target", [TWO, THREE])
def test_one_image_is_in_one_cell_of_each(target):
    classes = len(target.classes)
    for label in range(classes):
        sums = sums_of(Classification(), [[1e9] + [0.0] * (classes - 1)], [label], target)
        rows = cells_of(sums["histograms"])
        assert float(sums["confusion"].double().norm()) == 1
        assert rows.sum((1, 2)).tolist() == [1] * classes
        assert float(rows.double().norm()) == pytest.approx(math.sqrt(classes))


@pytest.mark.parametrize("target", [TWO, THREE])
@pytest.mark.parametrize("scale", [0.1, 5.0, 1000.0])
def test_a_coordinator_takes_noised_counts(target, scale):
    task, classes = Classification(), len(target.classes)
    rng = torch.Generator().manual_seed(1)
    labels = torch.randint(classes, (60,), generator=rng)
    outputs = torch.randn(60, classes, generator=rng) + 2 * torch.nn.functional.one_hot(labels, classes)
    told = task.noised(sums_of(task, outputs.tolist(), labels.tolist(), target), draws(2, scale), target)
    task.check_sums(told, target)
    assert int(told["confusion"].sum()) == int(told["count"]) == 60
    assert told["histograms"].shape == (classes, 2, BINS)
    assert all(0 <= task.finish(told)[name] <= 1 for name in ("accuracy", "balanced_accuracy"))


def test_little_noise_changes_little():
    task, rng = Classification(), torch.Generator().manual_seed(3)
    labels = torch.randint(2, (400,), generator=rng)
    outputs = torch.randn(400, 2, generator=rng) + torch.nn.functional.one_hot(labels, 2)
    sums = sums_of(task, outputs.tolist(), labels.tolist(), TWO)
    exact, told = task.finish(sums), task.finish(task.noised(sums, draws(4, 0.5), TWO))
    for name in ("accuracy", "balanced_accuracy", "auc"):
        assert told[name] == pytest.approx(exact[name], abs=0.05)


# --- projections --------------------------------------------------------------------------------------


def test_the_nearest_counts_by_hand():
    """5, 1 and -3 are to add up to 4: 1 less for the first two, and none of the third."""
    assert nearest_counts(torch.tensor([5.0, 1.0, -3.0]), 4).tolist() == [4, 0, 0]
    assert nearest_counts(torch.tensor([3.0, 2.0, -3.0]), 4).tolist() == [2.5, 1.5, 0]
    assert nearest_counts(torch.tensor([3.0, 2.0]), 0).tolist() == [0, 0]


def test_whole_counts_round_the_largest_rests_up():
    assert whole_counts(torch.tensor([1.6, 0.9, 2.5]), 5).tolist() == [2, 1, 2]
