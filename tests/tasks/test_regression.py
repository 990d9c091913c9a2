"""Regression: labels scaled by their public range, errors in the label's unit."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.errors import BadInput
from polyclinic.tasks import Regression, Target, Task

MONTHS = Target(unit="months", label_range=(0.0, 240.0))  # scaled: (label - 120) / 120


@pytest.mark.parametrize(
    ("criterion", "expected"), [("l1", (0.5 + 2.0) / 2), ("mse", (0.25 + 4.0) / 2), ("huber", (0.125 + 1.5) / 2)]
)
def test_loss_by_hand_on_scaled_labels(criterion, expected):
    task = Regression(criterion=criterion)
    output = torch.tensor([[0.5], [-1.0]])
    labels = task.targets(torch.tensor([120, 240]))  # scaled 0 and 1: off by 0.5 and 2
    assert labels.dtype == torch.float32
    assert task.loss(output, labels, MONTHS).item() == pytest.approx(expected)


def test_weights_favour_an_image():
    output, labels = torch.tensor([[0.5], [-1.0]]), torch.tensor([120.0, 240.0])
    weighted = Regression().loss(output, labels, MONTHS, weights=torch.tensor([3.0, 1.0]))
    assert weighted.item() == pytest.approx((3 * 0.5 + 2.0) / 4)


def test_metrics_by_hand_in_the_labels_unit():
    task = Regression()
    output, labels = torch.tensor([[0.5], [-1.0]]), torch.tensor([120.0, 240.0])
    assert task.predictions(output, MONTHS).tolist() == [180.0, 0.0]
    result = task.finish(task.sums(task.observe(output, labels, MONTHS), labels, None, MONTHS))
    wanted = {"mae": (60 + 240) / 2, "rmse": math.sqrt((60**2 + 240**2) / 2), "loss": 1.25}
    assert result == pytest.approx(wanted)


@given(st.lists(st.floats(0, 240), max_size=20), st.lists(st.floats(0, 240), max_size=20))
def test_sums_of_two_sites_are_those_of_the_pooled_images(ours, theirs):
    task = Regression(criterion="huber")
    labels = torch.tensor(ours + theirs, dtype=torch.float32)
    observed = torch.linspace(-1, 1, len(labels)).double()[:, None]
    parts = [slice(None, len(ours)), slice(len(ours), None)]
    added = task.add(*(task.sums(observed[part], labels[part], None, MONTHS) for part in parts))
    pooled = task.sums(observed, labels, None, MONTHS)
    assert added.keys() == pooled.keys()
    assert task.finish(added) == pytest.approx(task.finish(pooled))


@pytest.mark.parametrize("bad_range", [None, (5.0, 5.0), (9.0, 1.0)])
def test_labels_without_a_usable_public_range_are_refused(bad_range):
    with pytest.raises(BadInput, match=r"task\.name: regression needs a public range.*choose a source"):
        Regression().outputs(Target(unit="months", label_range=bad_range))
    assert Regression().outputs(MONTHS) == 1


def test_a_task_that_is_like_regression_predicts_values():
    """Of somebody else's task, whose network gives values as they are."""

    class Plain(Regression):
        predictions = Task.predictions

    assert Plain().predictions(torch.tensor([[7.0], [9.0]]), MONTHS).tolist() == [7.0, 9.0]
