"""Classification: loss and metrics against arithmetic by hand and scikit-learn's exact AUC."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, log_loss, roc_auc_score

from polyclinic.errors import BadInput
from polyclinic.tasks import Classification, Target

TASK = Classification()
TWO = Target(classes=("healthy", "ill"))
THREE = Target(classes=("a", "b", "c"))


def metrics(logits: torch.Tensor, labels: torch.Tensor, target: Target) -> dict[str, float]:
    observed = TASK.observe(logits, labels, target)
    return TASK.finish(TASK.sums(observed, labels, None, target))


def test_loss_by_hand_with_and_without_weights():
    logits = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]])  # probability of class 0: 1/2 and 3/4
    labels = torch.tensor([0, 1])
    first, second = math.log(2), math.log(4)
    assert TASK.loss(logits, labels, TWO).item() == pytest.approx((first + second) / 2)
    weighted = TASK.loss(logits, labels, TWO, weights=torch.tensor([3.0, 1.0]))
    assert weighted.item() == pytest.approx((3 * first + second) / 4)


def test_metrics_by_hand():
    # margins of class 1: 1, -1, 2, -2; labels 0 0 1 1: two of four right, pairs ordered right: 2>1, 2>-1
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 2.0], [2.0, 0.0]])
    labels = torch.tensor([0, 0, 1, 1])
    sums = TASK.sums(TASK.observe(logits, labels, TWO), labels, None, TWO)
    assert sums["confusion"].tolist() == [[1, 1], [1, 1]]
    assert sums["histograms"].shape == (2, 2, 1024)
    result = TASK.finish(sums)
    assert result["accuracy"] == 0.5
    assert result["auc"] == 0.5
    costs = [math.log(1 + math.exp(x)) for x in (1, -1, -2, 2)]
    assert result["loss"] == pytest.approx(sum(costs) / 4)


def test_balanced_accuracy_counts_classes_not_images():
    logits = torch.eye(3)[[0, 0, 0, 0, 1, 0]] * 5
    labels = torch.tensor([0, 0, 0, 0, 1, 1])
    result = metrics(logits, labels, THREE)
    assert result["accuracy"] == pytest.approx(5 / 6)
    assert result["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, logits.argmax(1)))


@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0, 300.0])
@pytest.mark.parametrize("separation", [0.0, 1.0, 3.0])
def test_auc_is_that_of_scikit_learn_from_timid_to_overconfident_scores(spread, separation):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 600)
    scores = spread * (rng.normal(size=600) + separation * labels)
    logits = torch.tensor(np.stack([np.zeros(600), scores], 1))
    exact = roc_auc_score(labels, scores)
    assert metrics(logits, torch.tensor(labels), TWO)["auc"] == pytest.approx(exact, abs=0.002)


def test_three_classes_give_the_macro_one_vs_rest_auc():
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 3, 500)
    logits = rng.normal(size=(500, 3)) + 1.5 * np.eye(3)[labels]
    probabilities = torch.tensor(logits).softmax(1).numpy()
    result = metrics(torch.tensor(logits), torch.tensor(labels), THREE)
    assert result["auc"] == pytest.approx(roc_auc_score(labels, probabilities, multi_class="ovr"), abs=0.002)
    assert result["loss"] == pytest.approx(log_loss(labels, probabilities))


def test_a_class_without_images_is_left_out_of_the_auc():
    logits = torch.tensor([[2.0, 0.0, -9.0], [0.0, 2.0, -9.0], [1.0, 0.0, -9.0], [0.0, 1.0, -9.0]])
    assert metrics(logits, torch.tensor([0, 1, 0, 1]), THREE)["auc"] == 1.0


def test_what_the_data_cannot_define_is_left_out():
    one_class = metrics(torch.randn(4, 2), torch.ones(4).long(), TWO)
    assert set(one_class) == {"accuracy", "balanced_accuracy", "loss"}
    assert metrics(torch.zeros(0, 2), torch.zeros(0).long(), TWO) == {}


def test_extreme_logits_keep_every_image_in_the_histograms():
    logits = torch.tensor([[0.0, 1e30], [1e30, 0.0], [0.0, torch.inf], [float("nan"), 0.0]])
    sums = TASK.sums(TASK.observe(logits, None, TWO), torch.tensor([1, 0, 1, 0]), None, TWO)
    assert sums["histograms"].sum((1, 2)).tolist() == [4, 4]


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=30), st.integers(0, 99))
def test_sums_of_two_sites_are_those_of_the_pooled_images(ours, theirs, seed):
    labels = torch.tensor(ours + theirs, dtype=torch.int64)
    logits = 3 * torch.randn(len(labels), 3, generator=torch.Generator().manual_seed(seed))
    observed = TASK.observe(logits, labels, THREE)
    parts = [slice(None, len(ours)), slice(len(ours), None)]
    sites = [TASK.sums(observed[part], labels[part], None, THREE) for part in parts]
    pooled = TASK.sums(observed, labels, None, THREE)
    added = TASK.add(*sites)
    assert added.keys() == pooled.keys()
    assert torch.equal(added["confusion"], pooled["confusion"])
    assert torch.equal(added["histograms"], pooled["histograms"])
    assert TASK.finish(added) == pytest.approx(TASK.finish(pooled))


def test_fewer_than_two_classes_is_an_error():
    assert TASK.outputs(THREE) == 3
    with pytest.raises(BadInput, match=r"task\.name: classification needs two classes or more, .* names 0"):
        TASK.outputs(Target(unit="months"))
