"""Coarse scores: no small counts, no image that stands out, and metrics that are still close to the exact ones."""

import math

import pytest
import torch

from polyclinic.metrics.roc import aucs_from_counts
from polyclinic.metrics.statistics.disclosure import step_above
from polyclinic.randomness import torch_rng
from polyclinic.tasks.classification import BINS, Classification, cells_of, loss_in
from polyclinic.tasks.regression import Regression
from polyclinic.tasks.segmentation import Segmentation
from polyclinic.tasks.task import Target, merge_small, nearest_counts, round_counts, round_mean, whole_counts

TWO = Target(("no", "yes"))
MONTHS = Target((), "months", (0.0, 10.0))
#: images of a site, sites, and the mean error of AUC and accuracy that is allowed
COST = [(60, 4, 0.06, 0.05), (100, 4, 0.04, 0.02), (400, 4, 0.02, 0.01)]


def test_counts_and_bins_of_few_images_by_hand():
    counts = torch.tensor([0, 4, 5, 9, 10, 12, 13, 17, 18])
    assert round_counts(counts, 10).tolist() == [0, 0, 10, 10, 10, 10, 15, 15, 20]
    assert round_counts(torch.tensor([0, 1, 2, 3]), 1).tolist() == [0, 1, 2, 3]
    assert float(round_mean(torch.tensor(0.4321), 100, 4.0)) == pytest.approx(0.45)  # steps of 0.05, above 4 / 100
    assert float(round_mean(torch.tensor(1e9), 100, 4.0)) == 4.0
    counts = torch.tensor([1, 0, 3, 1, 6, 0, 2, 2])
    # 1 + 3 + 1 reach 5, in four bins; 6 is enough; 2 + 2 are too few and join the 6: 10, in four bins. 5 is told as 6
    assert merge_small(counts, 5).tolist() == [1.5] * 4 + [2.5] * 4
    assert merge_small(counts, 1).tolist() == [1, 1.5, 1.5, 1, 6, 1, 1, 2]  # an empty bin belongs to the next cell
    assert merge_small(counts, 16).tolist() == [0] * 8
    # two bins at a time: 1, 4, 6, 4
    assert merge_small(counts, 1, 2).tolist() == [0.5, 0.5, 2, 2, 3, 3, 2, 2]
    # the first two and the last two count in the next ones: 4, 1, 6, 4
    assert merge_small(counts, 1, 1, 2).tolist() == [0, 0, 4, 1, 6, 4, 0, 0]


@pytest.mark.parametrize(("smallest", "step"), [(0.1, 0.1), (0.11, 0.2), (0.3, 0.5), (0.6, 1.0), (2, 2), (3, 5)])
def test_steps_are_one_two_or_five(smallest, step):
    assert step_above(smallest) == pytest.approx(step)


@pytest.mark.parametrize("places", [(0, 300, 639), (705, 800, 1023)])
@pytest.mark.parametrize("least", [5, 10])
def test_where_an_outlier_lies_cannot_be_seen(least, places):
    """Forty images in the middle and one anywhere on one side of them: always the same histogram."""
    crowd = torch.zeros(1024, dtype=torch.int64)
    crowd[640:704] = torch.tensor([1, 0] * 32)
    crowd[704] = 8
    one = torch.eye(1024, dtype=torch.int64)
    assert len({tuple(merge_small(crowd + one[at], least, 16, 256).tolist()) for at in places}) == 1


def test_the_loss_is_that_of_the_histograms():
    labels = torch.tensor([0, 1] * 50)
    shift = torch.randn(100, 1, generator=torch_rng("loss")) + 1.5 * labels[:, None] - 0.75
    logits = torch.cat([-shift, shift], 1).double()
    task = Classification()
    exact = task.sums(task.observe(logits, labels, TWO), labels, None, TWO)
    assert loss_in(exact["histograms"])[0] == pytest.approx(float(exact["loss"]), rel=0.01)
    one_wild = exact | {"loss": exact["loss"] + 1e6}
    assert torch.equal(task.coarse(one_wild, 10, TWO)["loss"], task.coarse(exact, 10, TWO)["loss"])


@pytest.mark.parametrize(("images", "sites", "auc", "accuracy"), COST)
def test_what_coarse_scores_cost(images, sites, auc, accuracy):
    """Over many draws of sites with so many images: the mean error of pooled metrics at min_cohort 10."""
    task, errors = Classification(), []
    for draw in range(20):
        rng, exact, coarse = torch_rng("coarse", draw), None, None
        for _ in range(sites):
            labels = torch.randint(2, (images,), generator=rng)
            shift = torch.randn(images, 1, generator=rng) + 1.5 * labels[:, None] - 0.75
            logits = torch.cat([-shift, shift], 1).double()
            sums = task.sums(task.observe(logits, labels, TWO), labels, None, TWO)
            less = task.coarse(sums, 10, TWO)
            exact = sums if exact is None else task.add(exact, sums)
            coarse = less if coarse is None else task.add(coarse, less)
        before, after = task.finish(exact), task.finish(coarse)
        errors.append([abs(before[name] - after[name]) for name in ("auc", "accuracy", "loss")])
    mean = torch.tensor(errors).mean(0)
    assert mean[0] < auc
    assert mean[1] < accuracy


def test_what_a_deployed_site_tells_passes_the_check_of_who_receives_it():
    """A liar's sums are refused, and an honest site's must not be, coarse as they are."""
    labels = torch.tensor([0, 1] * 50)
    logits = torch.randn(100, 2, generator=torch_rng("check")).double()
    task = Classification()
    exact = task.sums(task.observe(logits, labels, TWO), labels, None, TWO)
    for sums in (exact, task.coarse(exact, 10, TWO), task.coarse(exact, 1000, TWO)):
        task.check_sums(sums, TWO)
    with pytest.raises(ValueError, match="confusion matrix must be whole"):
        task.check_sums(exact | {"confusion": exact["confusion"] + 0.5}, TWO)
    labels = torch.tensor([0, 1] * 4)
    task = Classification()
    sums = task.sums(task.observe(torch.randn(8, 2).double(), labels, TWO), labels, None, TWO)
    assert task.finish(task.coarse(sums, 10, TWO)) == {}


def test_wild_predictions_and_distances_show_no_image():
    labels = torch.linspace(1, 9, 40)
    outputs = ((labels - 5) / 5 + 0.1)[:, None].double()
    wild = outputs.clone()
    wild[3] = 1e6
    task, told = Regression(), []
    for one in (outputs, wild):
        sums = task.sums(task.bounded(task.observe(one, labels, MONTHS), MONTHS), labels, None, MONTHS)
        told.append(task.finish(task.coarse(sums, 10, MONTHS)))
    # one of forty images adds at most 10 / 40 months to the mean, and steps are 0.5
    assert told[0]["mae"] == pytest.approx(0.5)
    assert abs(told[1]["mae"] - told[0]["mae"]) <= 0.5 + 1e-9
    assert all(abs(one["mae"] / 0.5 - round(one["mae"] / 0.5)) < 1e-9 for one in told)
    task = Segmentation(surface_distances=True)
    seen = torch.tensor([[5.0, 10, 10, 80, 3, 2, 1]] * 20).double()
    sums = task.sums(task.bounded(seen, TWO), torch.zeros(20), None, TWO)
    assert float(sums["loss"]) == 60
    coarse = task.coarse(sums, 10, TWO)
    assert task.finish(coarse) == {"dice": 0.5, "loss": 3.0}


AGES = Target(unit="months", label_range=(0.0, 200.0))
TWO, THREE = Target(classes=("a", "b")), Target(classes=("a", "b", "c"))


def sums_of(task, outputs, labels, target):
    targets = task.targets(torch.tensor(labels))
    observed = task.near(task.observe(torch.tensor(outputs), targets, target), targets, target)
    return task.sums(observed, targets, None, target)


def draws(seed, scale):
    rng = torch.Generator().manual_seed(seed)
    return lambda like: scale * torch.randn(like.shape, generator=rng, dtype=like.dtype)


def test_errors_and_noise_of_ages_by_hand():
    """Predictions 110 and 190 for 100 and 40: errors 10 and 150, which counts as 50, a quarter of the range."""
    task = Regression()
    sums = sums_of(task, [[0.1], [0.9]], [100.0, 40.0], AGES)
    assert float(sums["absolute_error"]) == pytest.approx(60)
    assert float(sums["squared_error"]) == pytest.approx(100 + 2500)
    told = task.noised(sums, torch.zeros_like, AGES)
    assert task.finish(told) == pytest.approx({"mae": 30, "rmse": math.sqrt(1300), "loss": 0.3})
    # One unit of noise is sqrt(2) of the largest errors, 50 and 2,500.
    told = Regression().noised(sums_of(Regression(), [[0.1]] * 8, [100.0] * 8, AGES), torch.ones_like, AGES)
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
    assert task.finish(task.noised(sums, torch.zeros_like, AGES))["loss"] == pytest.approx(
        task.finish(sums)["loss"], rel=0.3
    )


def test_counts_and_noise_of_two_classes_by_hand():
    """Without noise the matrix is as it was; the histograms of the first class mirror those of the second."""
    task = Classification()
    sums = sums_of(task, [[0.0, 2.0], [1.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [1, 1, 0, 0], TWO)
    told = task.noised(sums, torch.zeros_like, TWO)
    assert told["confusion"].tolist() == sums["confusion"].tolist() == [[1, 1], [1, 1]]
    assert torch.equal(told["histograms"][0, 0], told["histograms"][1, 1].flip(0))
    rest, own = told["histograms"][1]
    assert aucs_from_counts(own[None].numpy(), rest[None].numpy()) == pytest.approx(
        3 / 4
    )  # margins 2 and -1 against 1 and -3
    task.check_sums(told, TWO)
    # An image is in one cell of the matrix and one of a histogram: length sqrt(2). The same noise on all four cells of
    # the matrix is taken off again, as they add up to the four images.
    task, asked = Classification(), []

    def first_cell(like):
        asked.append(like.shape)
        return torch.nn.functional.one_hot(torch.tensor(0), like.numel()).reshape(like.shape).double()

    sums = sums_of(task, [[0.0, 2.0]] * 20 + [[2.0, 0.0]] * 20, [1] * 20 + [0] * 20, TWO)
    told = task.noised(sums, lambda like: 4 * first_cell(like), TWO)
    assert [tuple(shape) for shape in asked] == [(4,), (1, 2, 16)]
    # 20 + 4 sqrt(2) and 20, which are 45.66 together: 2.83 less for each; then whole
    assert told["confusion"].tolist() == [[23, 0], [0, 17]]
    task, rng = Classification(), torch.Generator().manual_seed(3)
    labels = torch.randint(2, (400,), generator=rng)
    outputs = torch.randn(400, 2, generator=rng) + torch.nn.functional.one_hot(labels, 2)
    sums = sums_of(task, outputs.tolist(), labels.tolist(), TWO)
    exact, told = task.finish(sums), task.finish(task.noised(sums, draws(4, 0.5), TWO))
    for name in ("accuracy", "balanced_accuracy", "auc"):
        assert told[name] == pytest.approx(exact[name], abs=0.05)


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


def test_the_nearest_counts_by_hand():
    """5, 1 and -3 are to add up to 4: 1 less for the first two, and none of the third."""
    assert nearest_counts(torch.tensor([5.0, 1.0, -3.0]), 4).tolist() == [4, 0, 0]
    assert nearest_counts(torch.tensor([3.0, 2.0, -3.0]), 4).tolist() == [2.5, 1.5, 0]
    assert nearest_counts(torch.tensor([3.0, -1.0]), 0).tolist() == [0, 0]
    assert nearest_counts(torch.tensor([3.0, -1.0]), 1).tolist() == [1, 0]
    assert nearest_counts(torch.tensor([0.5, 0.1]), 0.5).tolist() == pytest.approx([0.45, 0.05])
    assert whole_counts(torch.tensor([1.6, 0.9, 2.5]), 5).tolist() == [2, 1, 2]
