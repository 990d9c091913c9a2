"""Classification, regression and segmentation: losses, predictions and metrics by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from monai.metrics import DiceMetric
from sklearn.metrics import balanced_accuracy_score, log_loss, roc_auc_score

from polyclinic.errors import BadInput
from polyclinic.tasks import Classification, Regression, Segmentation, Target, Task

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


def test_classification_by_hand():
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
    logits = torch.eye(3)[[0, 0, 0, 0, 1, 0]] * 5
    labels = torch.tensor([0, 0, 0, 0, 1, 1])
    result = metrics(logits, labels, THREE)
    assert result["accuracy"] == pytest.approx(5 / 6)
    assert result["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, logits.argmax(1)))
    logits = torch.tensor([[2.0, 0.0, -9.0], [0.0, 2.0, -9.0], [1.0, 0.0, -9.0], [0.0, 1.0, -9.0]])
    assert metrics(logits, torch.tensor([0, 1, 0, 1]), THREE)["auc"] == 1.0
    one_class = metrics(torch.randn(4, 2), torch.ones(4).long(), TWO)
    assert set(one_class) == {"accuracy", "balanced_accuracy", "loss"}
    assert metrics(torch.zeros(0, 2), torch.zeros(0).long(), TWO) == {}
    logits = torch.tensor([[0.0, 1e30], [1e30, 0.0], [0.0, torch.inf], [float("nan"), 0.0]])
    sums = TASK.sums(TASK.observe(logits, None, TWO), torch.tensor([1, 0, 1, 0]), None, TWO)
    assert sums["histograms"].sum((1, 2)).tolist() == [4, 4]
    assert TASK.outputs(THREE) == 3
    with pytest.raises(BadInput, match=r"task\.name: classification needs two classes or more, .* names 0"):
        TASK.outputs(Target(unit="months"))


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


def test_regression_by_hand_in_the_labels_unit():
    task = Regression()
    output, labels = torch.tensor([[0.5], [-1.0]]), torch.tensor([120.0, 240.0])
    assert task.predictions(output, MONTHS).tolist() == [180.0, 0.0]
    result = task.finish(task.sums(task.observe(output, labels, MONTHS), labels, None, MONTHS))
    wanted = {"mae": (60 + 240) / 2, "rmse": math.sqrt((60**2 + 240**2) / 2), "loss": 1.25}
    assert result == pytest.approx(wanted)
    output, labels = torch.tensor([[0.5], [-1.0]]), torch.tensor([120.0, 240.0])
    weighted = Regression().loss(output, labels, MONTHS, weights=torch.tensor([3.0, 1.0]))
    assert weighted.item() == pytest.approx((3 * 0.5 + 2.0) / 4)


@given(st.lists(st.floats(0, 240), max_size=20), st.lists(st.floats(0, 240), max_size=20))
def test_sums_of_ages_at_two_sites_are_those_of_the_pooled_images(ours, theirs):
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


MASKS, LESION = Segmentation(), Target(classes=("lesion",))


def observed(predicted: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Observations of masks given as 0/1 [B, H, W]: logits are +5 inside, -5 outside."""
    targets = MASKS.targets(torch.zeros(len(true)), true.byte())
    return MASKS.observe(10.0 * predicted[:, None] - 5.0, targets, LESION)


def dice(observations: torch.Tensor, cases: torch.Tensor | None = None) -> float:
    return MASKS.finish(MASKS.sums(observations, torch.zeros(len(observations)), cases, LESION))["dice"]


def rows(*lengths: int) -> torch.Tensor:
    """One 1 x 8 image for each length, with its first so many pixels set."""
    return torch.stack([(torch.arange(8) < length).float()[None] for length in lengths])


def test_dice_by_hand_per_image_and_per_patient():
    facts = observed(rows(4, 0, 2), rows(2, 0, 6))
    assert facts[:, :3].tolist() == [[2, 4, 2], [0, 0, 0], [2, 2, 6]]
    assert dice(facts) == pytest.approx((4 / 6 + 1 + 4 / 8) / 3)
    # the empty slice belongs to the first patient, and no longer counts as a perfect one
    assert dice(facts, cases=torch.tensor([7, 7, 3])) == pytest.approx((4 / 6 + 4 / 8) / 2)
    assert dice(observed(rows(0), rows(3))) == 0
    assert dice(observed(rows(3), rows(0))) == 0
    assert dice(observed(rows(0), rows(0))) == 1
    assert MASKS.finish(MASKS.sums(torch.zeros(0, 4).double(), torch.zeros(0), None, LESION)) == {}
    with pytest.raises(BadInput, match=r"task\.name: segmentation needs masks"):
        MASKS.targets(torch.zeros(2), None)


def test_dice_of_images_is_monais():
    rng = torch.Generator().manual_seed(0)
    predicted, true = (torch.rand(2, 6, 9, 9, generator=rng) > 0.6).float()
    monai = DiceMetric(ignore_empty=False)
    monai(predicted[:, None], true[:, None])
    assert dice(observed(predicted, true)) == pytest.approx(monai.aggregate().item(), abs=1e-6)


def test_losses_of_masks_by_hand():
    logits = torch.tensor([math.log(3.0), 0.0]).reshape(1, 1, 1, 2)  # probabilities 3/4 and 1/2
    targets = MASKS.targets(torch.zeros(1), torch.tensor([[[1, 0]]], dtype=torch.uint8))
    soft_dice = 1 - 2 * 0.75 / (0.75 + 0.5 + 1)
    cross_entropy = (math.log(4 / 3) + math.log(2)) / 2
    assert MASKS.loss(logits, targets, LESION).item() == pytest.approx(soft_dice + cross_entropy, abs=1e-4)
    logits, masks = torch.randn(3, 1, 5, 5), torch.randint(0, 2, (3, 5, 5), dtype=torch.uint8)
    targets = MASKS.targets(torch.zeros(3), masks)
    together = MASKS.losses(logits, targets, LESION)
    alone = [MASKS.losses(logits[i : i + 1], targets[i : i + 1], LESION) for i in range(3)]
    assert torch.allclose(together, torch.cat(alone))
    weighted = MASKS.loss(logits, targets, LESION, weights=torch.tensor([0.0, 2.0, 0.0]))
    assert torch.allclose(weighted, together[1])


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 3)), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(4, 7)), max_size=12),
)
def test_sums_of_two_sites_are_those_of_the_pooled_patients(ours, theirs):
    images = ours + theirs
    facts = observed(rows(*(p for p, _, _ in images)), rows(*(t for _, t, _ in images)))
    cases = torch.tensor([case for _, _, case in images])
    parts = [slice(None, len(ours)), slice(len(ours), None)]
    added = MASKS.add(*(MASKS.sums(facts[part], cases[part], cases[part], LESION) for part in parts))
    pooled = MASKS.sums(facts, cases, cases, LESION)
    assert added.keys() == pooled.keys()
    assert MASKS.finish(added) == pytest.approx(MASKS.finish(pooled))


def square(left: int, top: int, side: int, size: int = 16):
    mask = torch.zeros(1, size, size)
    mask[:, top : top + side, left : left + side] = 1
    return mask


def test_distances_between_outlines_by_hand():
    task = Segmentation(surface_distances=True)
    line = torch.zeros(1, 16, 16)
    line[:, 4, 2:12] = 1
    moved = torch.zeros(1, 16, 16)
    moved[:, 7, 2:12] = 1  # the same line three pixels below: every pixel of one is three from the other
    corner = square(0, 0, 4)
    masks = torch.stack([line, corner, corner, torch.zeros(1, 16, 16)])
    guesses = torch.stack([moved, corner, torch.zeros(1, 16, 16), corner])
    facts = task.observe(guesses * 20 - 10, masks, Target())
    assert facts[:, 4:].tolist() == [[3, 3, 1], [0, 0, 1], [0, 0, 0], [0, 0, 0]]
    metrics = task.finish(task.sums(facts, torch.zeros(4), None, Target()))
    assert metrics["hausdorff95"] == metrics["average_surface_distance"] == 1.5  # of the two images that have both
    task = Segmentation(surface_distances=True)
    facts = task.observe(torch.full((2, 1, 8, 8), -5.0), torch.ones(2, 1, 8, 8), Target())
    assert task.finish(task.sums(facts, torch.zeros(2), None, Target())).keys() == {"dice", "loss"}
    assert Segmentation().observe(torch.zeros(2, 1, 8, 8), torch.ones(2, 1, 8, 8), Target()).shape == (2, 4)
