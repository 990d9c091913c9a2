"""Small rules of tasks, each by hand: mutants of them lived until these tests were written."""

from functools import partial

import pytest
import torch
from pydantic import ValidationError

from polyclinic.errors import BadInput
from polyclinic.models import BACKBONES, build, initial_weights
from polyclinic.settings import variant
from polyclinic.tasks import TASKS
from polyclinic.tasks.classification import BINS, TAIL, Classification, cells_of
from polyclinic.tasks.regression import Regression, scale
from polyclinic.tasks.segmentation import Segmentation, outline_distances
from polyclinic.tasks.task import Target, nearest_counts, round_mean

AGES = Target(unit="months", label_range=(0.0, 200.0))
OTHER_AGES = Target(unit="months", label_range=(100.0, 200.0))
TWO = Target(classes=("a", "b"))


def number(value, dtype=torch.float64):
    return torch.tensor(value, dtype=dtype)


# --- which model is better ----------------------------------------------------------------------------


def test_a_higher_accuracy_and_a_lower_error_are_better():
    assert Classification().rank({"accuracy": 0.75, "loss": 0.5}) == (0.75, -0.5)
    assert Classification().rank({"accuracy": 0.75}) == (0.75, 0.0)
    assert Regression().rank({"mae": 8.0, "loss": 0.25}) == (-8.0, -0.25)


def test_a_metric_that_is_named_decides_and_one_that_is_not_there_gives_nothing():
    assert Classification().rank({"accuracy": 0.75, "auc": 0.25, "loss": 1.0}, "auc") == (0.25, -1.0)
    assert Classification().rank({"accuracy": 0.75, "loss": 2.0}, "loss") == (-2.0, -2.0)
    assert Classification().rank({"accuracy": 0.75}, "auc") is None


# --- predictions --------------------------------------------------------------------------------------


def test_predictions_are_probabilities_of_classes_and_of_a_mask():
    shares = Classification().predictions(torch.tensor([[1.0, 1.0], [2.0, 2.0]]), TWO)
    assert shares.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    mask = Segmentation().predictions(torch.zeros(2, 1, 3, 4), Target())
    assert mask.shape == (2, 3, 4)
    assert bool((mask == 0.5).all())


def test_the_range_of_labels_has_a_middle_and_half_a_width():
    assert scale(OTHER_AGES) == (150.0, 50.0)
    assert Regression().predictions(torch.tensor([[0.5]]), OTHER_AGES).tolist() == [175.0]


# --- coarse sums --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("criterion", "loss"), [("l1", 2.0), ("mse", 4.0), ("huber", 1.5)])
def test_bounds_of_a_regression_are_those_of_the_widest_error(criterion, loss):
    bounds = Regression(criterion=criterion).bounds(OTHER_AGES)
    assert bounds == {"absolute_error": (100.0, "count"), "squared_error": (1e4, "count"), "loss": (loss, "count")}


def test_outputs_are_bounded_by_the_range_of_labels():
    assert Regression().bounded(torch.tensor([-3.0, -0.5, 0.5, 3.0]), AGES).tolist() == [-1.0, -0.5, 0.5, 1.0]


def test_a_mean_of_one_image_is_told_in_steps_of_its_bound():
    assert float(round_mean(torch.tensor(0.6), 1, 1.0)) == 1.0
    assert float(round_mean(torch.tensor(0.6), 0, 1.0)) == 1.0


def test_figures_without_a_count_are_rounded_between_minus_one_and_one():
    told = Regression().coarse({"auc": number(0.567), "gain": number(-7.0)}, 10, AGES)
    assert {name: float(value) for name, value in told.items()} == pytest.approx({"auc": 0.6, "gain": -1.0})
    told = Classification().coarse({"auc": number(0.567)}, 10, TWO)
    assert float(told["auc"]) == pytest.approx(0.6)


def test_sums_of_one_image_are_coarse_too():
    sums = {"absolute_error": number(30.0), "count": torch.tensor(1)}
    assert float(Regression().coarse(sums, 1, AGES)["absolute_error"]) == 0.0  # steps of 200 for one image
    assert float(Regression().coarse({**sums, "absolute_error": number(150.0)}, 1, AGES)["absolute_error"]) == 200.0


def test_a_sum_without_a_bound_is_not_told_and_one_without_images_is_nothing():
    told = Regression().coarse({"more": number(7.0), "count": torch.tensor(20)}, 10, AGES)
    assert float(told["more"]) == 0.0
    nobody = Segmentation().coarse({"dice": number(0.0), "cases": torch.tensor(0), "count": torch.tensor(0)}, 10, AGES)
    assert float(nobody["dice"]) == 0.0


# --- noised sums --------------------------------------------------------------------------------------


class OtherSums(Classification):
    def sums(self, observations, labels, cases, target):
        return super().sums(observations, labels, cases, target)


class OtherErrors(Regression):
    def sums(self, observations, labels, cases, target):
        return super().sums(observations, labels, cases, target)


@pytest.mark.parametrize(("task", "known"), [(Classification, True), (Regression, True), (OtherSums, False)])
def test_only_sums_that_are_known_can_be_noised(task, known):
    assert task().can_be_noised is known
    assert not OtherErrors().can_be_noised


def test_noised_errors_are_never_negative():
    sums = {"absolute_error": number(0.0), "squared_error": number(0.0), "loss": number(0.0), "count": torch.tensor(4)}
    told = Regression().noised(sums, lambda like: -torch.ones_like(like), AGES)
    assert (float(told["absolute_error"]), float(told["squared_error"])) == (0.0, 0.0)


def test_noised_scores_of_nobody_have_no_loss():
    task = Classification()
    sums = task.sums(torch.zeros(0, 2).double(), torch.zeros(0, dtype=torch.int64), None, TWO)
    assert float(task.noised(sums, lambda like: torch.zeros_like(like), TWO)["loss"]) == 0.0


def test_cells_hold_what_lies_beyond_them():
    histograms = torch.zeros(1, 2, BINS, dtype=torch.int64)
    histograms[0, 0, 0] = histograms[0, 0, TAIL - 1] = 1
    histograms[0, 1, -1] = histograms[0, 1, BINS - TAIL] = 1
    cells = cells_of(histograms)
    assert (cells[0, 0, 0], cells[0, 1, -1], cells.sum()) == (2, 2, 4)


def test_nearest_counts_of_no_images_and_of_one():
    assert nearest_counts(torch.tensor([3.0, -1.0]), 0).tolist() == [0.0, 0.0]
    assert nearest_counts(torch.tensor([3.0, -1.0]), 1).tolist() == [1.0, 0.0]
    assert nearest_counts(torch.tensor([0.5, 0.1]), 0.5).tolist() == pytest.approx([0.45, 0.05])


# --- masks --------------------------------------------------------------------------------------------


def test_a_pixel_is_predicted_above_an_output_of_zero():
    output = torch.tensor([0.4, 0.6, 1.5, -1.0]).reshape(1, 1, 2, 2)
    observed = Segmentation().observe(output, torch.ones(1, 1, 2, 2), Target())
    assert observed[0, :3].tolist() == [3.0, 3.0, 4.0]


def test_distances_are_means_over_the_images_that_have_an_outline():
    sums = {"dice": number(6.0), "cases": torch.tensor(8), "loss": number(4.0), "count": torch.tensor(8)}
    assert Segmentation().finish(sums) == {"dice": 0.75, "loss": 0.5}
    outlines = {"hausdorff95": number(9.0), "average_surface_distance": number(6.0), "outlined": number(3.0)}
    found = Segmentation(surface_distances=True).finish(sums | outlines)
    assert found == {"dice": 0.75, "loss": 0.5, "hausdorff95": 3.0, "average_surface_distance": 2.0}
    assert Segmentation(surface_distances=True).finish(sums | {**outlines, "outlined": number(0.0)}).keys() == {
        "dice",
        "loss",
    }


def test_the_hausdorff_distance_leaves_out_the_farthest_twentieth():
    """Lines of 100 and 50 pixels that begin at the same place: the 100 are 50 times 0, then 1 to 50 pixels away."""
    predicted, true = torch.zeros(2, 1, 1, 4, 100, dtype=torch.bool)
    predicted[..., 1, :], true[..., 1, :50] = True, True
    [[hausdorff, average, counted]] = outline_distances(predicted, true).tolist()
    assert hausdorff == pytest.approx(45 + 0.05)
    assert average == pytest.approx(sum(range(51)) / 150)
    assert counted == 1


# --- The `[task]` table of a study, and what every task promises


TARGET = Target(classes=("a", "b"), unit="months", label_range=(0.0, 10.0))


def test_a_table_is_parsed_by_the_class_it_names():
    table = {"name": "regression", "criterion": "huber"}
    task = variant(TASKS, table, path="task", key="name")(**table)
    assert task == Regression(criterion="huber")
    assert task.model_dump() == table


def test_unknown_names_and_settings_are_refused():
    with pytest.raises(BadInput, match=r"task\.name: no such choice: 'regresion' \(did you mean 'regression'\?\)"):
        variant(TASKS, {"name": "regresion"}, path="task", key="name")
    with pytest.raises(ValidationError, match="criterion"):
        TASKS["regression"](name="regression", criterion="l3")
    with pytest.raises(ValidationError, match="criterion"):
        TASKS["classification"](name="classification", criterion="l1")


@pytest.mark.parametrize(
    ("name", "backbone"),
    [("classification", "small-cnn"), ("regression", "small-cnn"), ("segmentation", "unet")],
)
def test_a_task_trains_and_measures_a_backbone_of_its_kind(name, backbone):
    task = TASKS[name](name=name)
    assert task.dense == BACKBONES[backbone].dense
    rng = torch.Generator().manual_seed(0)
    images = torch.randn(6, 1, 28, 28, generator=rng)
    labels, masks = torch.arange(6) % 2, (images[:, 0] > 0.5).byte()
    targets = task.targets(labels, masks)
    builder = partial(build, backbone, channels=1, outputs=task.outputs(TARGET), size=28, norm="group")
    model = builder()
    model.load_state_dict(initial_weights(builder, 0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = task.loss(model(images), targets, TARGET)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    output = model(images)
    result = task.finish(task.sums(task.observe(output, targets, TARGET), labels, None, TARGET))
    assert task.metric in result
    assert task.better in ("higher", "lower")
    assert result["loss"] == pytest.approx(task.loss(output, targets, TARGET).item(), rel=1e-5)
