"""Rules of tasks, each by hand: predictions, coarse and noised sums, masks, and sums that no site can have."""

import pytest
import torch

from polyclinic.tasks.classification import BINS, TAIL, Classification, cells_of
from polyclinic.tasks.regression import Regression, scale
from polyclinic.tasks.segmentation import Segmentation, outline_distances
from polyclinic.tasks.task import LARGEST_SUM, MOST_IMAGES, Target, round_mean

AGES = Target(unit="months", label_range=(0.0, 200.0))
OTHER_AGES = Target(unit="months", label_range=(100.0, 200.0))
TWO = Target(classes=("a", "b"))


def number(value, dtype=torch.float64):
    return torch.tensor(value, dtype=dtype)


def test_metrics_rank_higher_accuracy_and_lower_error():
    assert Classification().rank({"accuracy": 0.75, "loss": 0.5}) == (0.75, -0.5)
    assert Classification().rank({"accuracy": 0.75}) == (0.75, 0.0)
    assert Regression().rank({"mae": 8.0, "loss": 0.25}) == (-8.0, -0.25)
    assert Classification().rank({"accuracy": 0.75, "auc": 0.25, "loss": 1.0}, "auc") == (0.25, -1.0)
    assert Classification().rank({"accuracy": 0.75, "loss": 2.0}, "loss") == (-2.0, -2.0)
    assert Classification().rank({"accuracy": 0.75}, "auc") is None


def test_predictions_ranges_and_bounds_by_hand():
    shares = Classification().predictions(torch.tensor([[1.0, 1.0], [2.0, 2.0]]), TWO)
    assert shares.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    mask = Segmentation().predictions(torch.zeros(2, 1, 3, 4), Target())
    assert mask.shape == (2, 3, 4)
    assert bool((mask == 0.5).all())
    assert scale(OTHER_AGES) == (150.0, 50.0)
    assert Regression().predictions(torch.tensor([[0.5]]), OTHER_AGES).tolist() == [175.0]
    assert Regression().bounded(torch.tensor([-3.0, -0.5, 0.5, 3.0]), AGES).tolist() == [-1.0, -0.5, 0.5, 1.0]
    output = torch.tensor([0.4, 0.6, 1.5, -1.0]).reshape(1, 1, 2, 2)
    observed = Segmentation().observe(output, torch.ones(1, 1, 2, 2), Target())
    assert observed[0, :3].tolist() == [3.0, 3.0, 4.0]


@pytest.mark.parametrize(("criterion", "loss"), [("l1", 2.0), ("mse", 4.0), ("huber", 1.5)])
def test_bounds_of_a_regression_are_those_of_the_widest_error(criterion, loss):
    bounds = Regression(criterion=criterion).bounds(OTHER_AGES)
    assert bounds == {"absolute_error": (100.0, "count"), "squared_error": (1e4, "count"), "loss": (loss, "count")}


def test_coarse_sums_of_one_image_or_of_none():
    assert float(round_mean(torch.tensor(0.6), 1, 1.0)) == 1.0
    assert float(round_mean(torch.tensor(0.6), 0, 1.0)) == 1.0
    told = Regression().coarse({"auc": number(0.567), "gain": number(-7.0)}, 10, AGES)
    assert {name: float(value) for name, value in told.items()} == pytest.approx({"auc": 0.6, "gain": -1.0})
    told = Classification().coarse({"auc": number(0.567)}, 10, TWO)
    assert float(told["auc"]) == pytest.approx(0.6)
    sums = {"absolute_error": number(30.0), "count": torch.tensor(1)}
    assert float(Regression().coarse(sums, 1, AGES)["absolute_error"]) == 0.0  # steps of 200 for one image
    assert float(Regression().coarse({**sums, "absolute_error": number(150.0)}, 1, AGES)["absolute_error"]) == 200.0
    told = Regression().coarse({"more": number(7.0), "count": torch.tensor(20)}, 10, AGES)
    assert float(told["more"]) == 0.0
    nobody = Segmentation().coarse({"dice": number(0.0), "cases": torch.tensor(0), "count": torch.tensor(0)}, 10, AGES)
    assert float(nobody["dice"]) == 0.0


@pytest.mark.parametrize("task", [Classification, Regression])
def test_only_sums_that_are_known_can_be_noised(task):
    assert task().can_be_noised
    other = type("Other", (task,), {"sums": lambda *given: task.sums(*given)})
    assert not other().can_be_noised


def test_noised_scores_are_never_negative_and_have_cells_and_a_loss():
    sums = {"absolute_error": number(0.0), "squared_error": number(0.0), "loss": number(0.0), "count": torch.tensor(4)}
    told = Regression().noised(sums, lambda like: -torch.ones_like(like), AGES)
    assert (float(told["absolute_error"]), float(told["squared_error"])) == (0.0, 0.0)
    task = Classification()
    sums = task.sums(torch.zeros(0, 2).double(), torch.zeros(0, dtype=torch.int64), None, TWO)
    assert float(task.noised(sums, lambda like: torch.zeros_like(like), TWO)["loss"]) == 0.0
    histograms = torch.zeros(1, 2, BINS, dtype=torch.int64)
    histograms[0, 0, 0] = histograms[0, 0, TAIL - 1] = 1
    histograms[0, 1, -1] = histograms[0, 1, BINS - TAIL] = 1
    cells = cells_of(histograms)
    assert (cells[0, 0, 0], cells[0, 1, -1], cells.sum()) == (2, 2, 4)


def test_distances_of_outlines_by_hand():
    sums = {"dice": number(6.0), "cases": torch.tensor(8), "loss": number(4.0), "count": torch.tensor(8)}
    assert Segmentation().finish(sums) == {"dice": 0.75, "loss": 0.5}
    outlines = {"hausdorff95": number(9.0), "average_surface_distance": number(6.0), "outlined": number(3.0)}
    found = Segmentation(surface_distances=True).finish(sums | outlines)
    assert found == {"dice": 0.75, "loss": 0.5, "hausdorff95": 3.0, "average_surface_distance": 2.0}
    none = Segmentation(surface_distances=True).finish(sums | {**outlines, "outlined": number(0.0)})
    assert set(none) == {"dice", "loss"}
    # Lines of 100 and 50 pixels that begin at the same place: the 100 are 50 times 0, then 1 to 50 pixels away.
    predicted, true = torch.zeros(2, 1, 1, 4, 100, dtype=torch.bool)
    predicted[..., 1, :], true[..., 1, :50] = True, True
    [[hausdorff, average, counted]] = outline_distances(predicted, true).tolist()
    assert hausdorff == pytest.approx(45 + 0.05)
    assert average == pytest.approx(sum(range(51)) / 150)
    assert counted == 1


MONTHS, MASKS = Target((), "months", (0.0, 10.0)), Target(())


def errors(**changes):
    """Sums of a regression on four images."""
    sums = {"absolute_error": number(4.0), "squared_error": number(6.0), "loss": number(1.0)}
    return {**sums, "count": number(4, torch.int64), **changes}


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


def test_honest_and_rounded_sums_pass():
    Regression().check_sums(errors(), MONTHS)
    Regression().check_sums(errors(count=number(MOST_IMAGES, torch.int64)), MONTHS)
    Regression().check_sums(errors(loss=number(4 * LARGEST_SUM)), MONTHS)
    Regression().check_sums(errors(loss=number(0.0)), MONTHS)
    Segmentation().check_sums(overlaps(), MASKS)
    Segmentation().check_sums(overlaps(dice=number(3.0), count=number(3, torch.int64)), MASKS)
    Classification().check_sums(counts(), TWO)
    for own, others in ((5.0, 5.0), (4 * 20.0 + 200, 5.0), (20.0, 4 * 40.0 + 200)):  # a fourth of the images, at worst
        Classification().check_sums(counts(histogram=histograms(own, others)), TWO)


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"histogram": histograms(4.9, 5.0)}, "far fewer images"),
        ({"histogram": histograms(4 * 20.0 + 201, 5.0)}, "far more images than 'count'"),
        ({"histogram": histograms(20.0, 4 * 40.0 + 201)}, "far more images of other classes"),
        ({"histogram": histograms(20.0, -1.0)}, "a histogram counts fewer than 0"),
        ({"histogram": histograms(20.0, MOST_IMAGES * 1.01)}, "a histogram counts fewer than 0 or more"),
        ({"count": number(41, torch.int64)}, "another number of images"),
        ({"confusion": torch.zeros(3, 3, dtype=torch.int64)}, "of 2 classes"),
    ],
)
def test_what_no_classification_can_have(changes, words):
    with pytest.raises(ValueError, match=words):
        Classification().check_sums(counts(**changes), TWO)
