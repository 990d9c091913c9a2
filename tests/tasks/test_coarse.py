"""Coarse scores: no small counts, no image that stands out, and metrics that are still close to the exact ones."""

import pytest
import torch

from polyclinic.metrics.statistics.safe import step_above
from polyclinic.randomness import torch_rng
from polyclinic.tasks.classification import Classification, loss_in
from polyclinic.tasks.regression import Regression
from polyclinic.tasks.segmentation import Segmentation
from polyclinic.tasks.task import Target, merge_small, round_counts, round_mean

TWO = Target(("no", "yes"))
MONTHS = Target((), "months", (0.0, 10.0))
#: images of a site, sites, and the mean error of AUC and accuracy that is allowed
COST = [(60, 4, 0.06, 0.05), (100, 4, 0.04, 0.02), (400, 4, 0.02, 0.01)]


def test_counts_are_none_or_at_least_the_smallest_by_hand():
    counts = torch.tensor([0, 4, 5, 9, 10, 12, 13, 17, 18])
    assert round_counts(counts, 10).tolist() == [0, 0, 10, 10, 10, 10, 15, 15, 20]
    assert round_counts(torch.tensor([0, 1, 2, 3]), 1).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("smallest", "step"), [(0.1, 0.1), (0.11, 0.2), (0.3, 0.5), (0.6, 1.0), (2, 2), (3, 5)])
def test_steps_are_one_two_or_five(smallest, step):
    assert step_above(smallest) == pytest.approx(step)


def test_a_mean_is_cut_off_and_rounded_to_what_one_image_changes():
    assert float(round_mean(torch.tensor(0.4321), 100, 4.0)) == pytest.approx(0.45)  # steps of 0.05, above 4 / 100
    assert float(round_mean(torch.tensor(1e9), 100, 4.0)) == 4.0


def test_small_bins_join_their_neighbours_by_hand():
    counts = torch.tensor([1, 0, 3, 1, 6, 0, 2, 2])
    # 1 + 3 + 1 reach 5, in four bins; 6 is enough; 2 + 2 are too few and join the 6: 10, in four bins. 5 is told as 6
    assert merge_small(counts, 5).tolist() == [1.5] * 4 + [2.5] * 4
    assert merge_small(counts, 1).tolist() == [1, 1.5, 1.5, 1, 6, 1, 1, 2]  # an empty bin belongs to the next cell
    assert merge_small(counts, 16).tolist() == [0] * 8
    # two bins at a time: 1, 4, 6, 4
    assert merge_small(counts, 1, 2).tolist() == [0.5, 0.5, 2, 2, 3, 3, 2, 2]
    # the first two and the last two count in the next ones: 4, 1, 6, 4
    assert merge_small(counts, 1, 1, 2).tolist() == [0, 0, 4, 1, 6, 4, 0, 0]


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


def test_too_few_images_of_every_class_tell_nothing():
    labels = torch.tensor([0, 1] * 4)
    task = Classification()
    sums = task.sums(task.observe(torch.randn(8, 2).double(), labels, TWO), labels, None, TWO)
    assert task.finish(task.coarse(sums, 10, TWO)) == {}


def test_one_wild_prediction_does_not_show_in_a_regression():
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


def test_a_segmentations_distances_stay_and_its_loss_is_cut_off():
    task = Segmentation(surface_distances=True)
    seen = torch.tensor([[5.0, 10, 10, 80, 3, 2, 1]] * 20).double()
    sums = task.sums(task.bounded(seen, TWO), torch.zeros(20), None, TWO)
    assert float(sums["loss"]) == 60
    coarse = task.coarse(sums, 10, TWO)
    assert task.finish(coarse) == {"dice": 0.5, "loss": 3.0}
