"""Sums of scores that no site can have are refused, each by its own bound; those at the bound are not."""

import pytest
import torch

from polyclinic.tasks.classification import BINS, Classification
from polyclinic.tasks.regression import Regression
from polyclinic.tasks.segmentation import Segmentation
from polyclinic.tasks.task import LARGEST_SUM, MOST_IMAGES, Target

TWO = Target(("no", "yes"))
MONTHS = Target((), "months", (0.0, 10.0))
MASKS = Target(())


def number(value, dtype=torch.float64):
    return torch.tensor(value, dtype=dtype)


def errors(**changes):
    """Sums of a regression on four images."""
    return {
        "absolute_error": number(4.0),
        "squared_error": number(6.0),
        "loss": number(1.0),
        "count": number(4, torch.int64),
        **changes,
    }


def overlaps(**changes):
    """Sums of a segmentation: four images of three patients."""
    whole = {"cases": number(3, torch.int64), "count": number(4, torch.int64)}
    return {"dice": number(2.5), "loss": number(1.0), **whole, **changes}


def counts(images=40, histogram=None, **changes):
    """Sums of a classification of two classes, half of the images each."""
    histograms = torch.zeros(2, 2, BINS)
    histograms[:, :, 3] = images / 2
    confusion = torch.tensor([[images // 2, 0], [0, images // 2]])
    whole = {"loss": number(1.0), "count": number(images, torch.int64)}
    return {"confusion": confusion, "histograms": histograms if histogram is None else histogram, **whole, **changes}


def test_honest_sums_pass_up_to_the_largest_ones():
    Regression().check_sums(errors(), MONTHS)
    Regression().check_sums(errors(count=number(MOST_IMAGES, torch.int64)), MONTHS)
    Regression().check_sums(errors(loss=number(4 * LARGEST_SUM)), MONTHS)
    Regression().check_sums(errors(loss=number(0.0)), MONTHS)
    Segmentation().check_sums(overlaps(), MASKS)
    Segmentation().check_sums(overlaps(dice=number(3.0), count=number(3, torch.int64)), MASKS)
    Classification().check_sums(counts(), TWO)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"count": number(MOST_IMAGES + 1, torch.int64)}, "the limit is"),
        ({"loss": number(4 * LARGEST_SUM * 1.01)}, "beyond all bounds"),
        ({"count": number(0, torch.int64), "loss": number(LARGEST_SUM * 1.01)}, "beyond all bounds"),
        ({"loss": number(float("nan"))}, "not finite"),
        ({"loss": number(float("inf"))}, "not finite"),
        ({"loss": number(1.0, torch.complex64)}, "no number"),
        ({"more": number(True, torch.bool)}, "no number"),
        ({"more": number(-1, torch.int64)}, "negative"),
        ({"loss": number(-1e-3)}, "negative"),
        ({"count": number(4.0)}, "'count' is no whole number"),
        ({"count": torch.tensor([4, 4])}, "'count' is no whole number"),
        ({"cases": number(4.0)}, "'cases' is no whole number"),
        ({"cases": torch.tensor([4, 4])}, "'cases' is no whole number"),
        ({"absolute_error": torch.ones(2)}, "no single number"),
        ({"loss": number(1, torch.int64)}, "'loss' was cut off to few digits"),
        ({"loss": number(1, torch.float16)}, "'loss' was cut off to few digits"),
    ],
)
def test_what_no_regression_can_have(changes, words):
    with pytest.raises(ValueError, match=words):
        Regression().check_sums(errors(**changes), MONTHS)


@pytest.mark.parametrize("name", ["absolute_error", "squared_error", "loss", "count"])
def test_a_sum_that_is_missing(name):
    sums = errors()
    del sums[name]
    with pytest.raises(ValueError, match=f"'{name}' is missing"):
        Regression().check_sums(sums, MONTHS)


@pytest.mark.parametrize("changes", [{"dice": number(3.1)}, {"cases": number(5, torch.int64), "dice": number(1.0)}])
def test_what_no_segmentation_can_have(changes):
    with pytest.raises(ValueError, match="a Dice above 1, or more patients than images"):
        Segmentation().check_sums(overlaps(**changes), MASKS)


def histograms(own, others):
    """A class's own images, and those of others, in one bin each."""
    found = torch.zeros(2, 2, BINS)
    found[:, 1, 3], found[:, 0, 3] = own, others
    return found


def test_what_no_classification_can_have():
    task = Classification()
    task.check_sums(counts(histogram=histograms(5.0, 5.0)), TWO)  # a fourth of the images: rounded, at the worst
    with pytest.raises(ValueError, match="far fewer images"):
        task.check_sums(counts(histogram=histograms(4.9, 5.0)), TWO)
    task.check_sums(counts(histogram=histograms(4 * 20.0 + 200, 5.0)), TWO)
    with pytest.raises(ValueError, match="far more images than 'count'"):
        task.check_sums(counts(histogram=histograms(4 * 20.0 + 201, 5.0)), TWO)
    task.check_sums(counts(histogram=histograms(20.0, 4 * 40.0 + 200)), TWO)
    with pytest.raises(ValueError, match="far more images of other classes"):
        task.check_sums(counts(histogram=histograms(20.0, 4 * 40.0 + 201)), TWO)
    with pytest.raises(ValueError, match="a histogram counts fewer than 0"):
        task.check_sums(counts(histogram=histograms(20.0, -1.0)), TWO)
    with pytest.raises(ValueError, match="a histogram counts fewer than 0 or more"):
        task.check_sums(counts(histogram=histograms(20.0, MOST_IMAGES * 1.01)), TWO)
    with pytest.raises(ValueError, match="another number of images"):
        task.check_sums(counts(count=number(41, torch.int64)), TWO)
    with pytest.raises(ValueError, match="of 2 classes"):
        task.check_sums(counts(confusion=torch.zeros(3, 3, dtype=torch.int64)), TWO)
