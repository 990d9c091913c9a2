"""Segmentation: Dice per patient or per image, against arithmetic by hand and MONAI."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from monai.metrics import DiceMetric

from polyclinic.errors import BadInput
from polyclinic.tasks import Segmentation, Target

TASK, LESION = Segmentation(), Target(classes=("lesion",))


def observed(predicted: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Observations of masks given as 0/1 [B, H, W]: logits are +5 inside, -5 outside."""
    targets = TASK.targets(torch.zeros(len(true)), true.byte())
    return TASK.observe(10.0 * predicted[:, None] - 5.0, targets, LESION)


def dice(observations: torch.Tensor, cases: torch.Tensor | None = None) -> float:
    return TASK.finish(TASK.sums(observations, torch.zeros(len(observations)), cases, LESION))["dice"]


def rows(*lengths: int) -> torch.Tensor:
    """One 1 x 8 image for each length, with its first so many pixels set."""
    return torch.stack([(torch.arange(8) < length).float()[None] for length in lengths])


def test_dice_by_hand_per_image_and_per_patient():
    facts = observed(rows(4, 0, 2), rows(2, 0, 6))
    assert facts[:, :3].tolist() == [[2, 4, 2], [0, 0, 0], [2, 2, 6]]
    assert dice(facts) == pytest.approx((4 / 6 + 1 + 4 / 8) / 3)
    # the empty slice belongs to the first patient, and no longer counts as a perfect one
    assert dice(facts, cases=torch.tensor([7, 7, 3])) == pytest.approx((4 / 6 + 4 / 8) / 2)


def test_predicting_nothing_where_something_is_scores_zero_and_both_empty_one():
    assert dice(observed(rows(0), rows(3))) == 0
    assert dice(observed(rows(3), rows(0))) == 0
    assert dice(observed(rows(0), rows(0))) == 1


def test_dice_of_images_is_monais():
    rng = torch.Generator().manual_seed(0)
    predicted, true = (torch.rand(2, 6, 9, 9, generator=rng) > 0.6).float()
    monai = DiceMetric(ignore_empty=False)
    monai(predicted[:, None], true[:, None])
    assert dice(observed(predicted, true)) == pytest.approx(monai.aggregate().item(), abs=1e-6)


def test_loss_by_hand_is_soft_dice_plus_cross_entropy():
    logits = torch.tensor([math.log(3.0), 0.0]).reshape(1, 1, 1, 2)  # probabilities 3/4 and 1/2
    targets = TASK.targets(torch.zeros(1), torch.tensor([[[1, 0]]], dtype=torch.uint8))
    soft_dice = 1 - 2 * 0.75 / (0.75 + 0.5 + 1)
    cross_entropy = (math.log(4 / 3) + math.log(2)) / 2
    assert TASK.loss(logits, targets, LESION).item() == pytest.approx(soft_dice + cross_entropy, abs=1e-4)


def test_each_image_has_a_loss_of_its_own():
    logits, masks = torch.randn(3, 1, 5, 5), torch.randint(0, 2, (3, 5, 5), dtype=torch.uint8)
    targets = TASK.targets(torch.zeros(3), masks)
    together = TASK.losses(logits, targets, LESION)
    alone = [TASK.losses(logits[i : i + 1], targets[i : i + 1], LESION) for i in range(3)]
    assert torch.allclose(together, torch.cat(alone))
    weighted = TASK.loss(logits, targets, LESION, weights=torch.tensor([0.0, 2.0, 0.0]))
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
    added = TASK.add(*(TASK.sums(facts[part], cases[part], cases[part], LESION) for part in parts))
    pooled = TASK.sums(facts, cases, cases, LESION)
    assert added.keys() == pooled.keys()
    assert TASK.finish(added) == pytest.approx(TASK.finish(pooled))


def test_no_images_no_metrics():
    assert TASK.finish(TASK.sums(torch.zeros(0, 4).double(), torch.zeros(0), None, LESION)) == {}


def test_masks_are_needed():
    with pytest.raises(BadInput, match=r"task\.name: segmentation needs masks"):
        TASK.targets(torch.zeros(2), None)


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


def test_distances_are_left_out_where_no_image_has_both_outlines():
    task = Segmentation(surface_distances=True)
    facts = task.observe(torch.full((2, 1, 8, 8), -5.0), torch.ones(2, 1, 8, 8), Target())
    assert task.finish(task.sums(facts, torch.zeros(2), None, Target())).keys() == {"dice", "loss"}
    assert Segmentation().observe(torch.zeros(2, 1, 8, 8), torch.ones(2, 1, 8, 8), Target()).shape == (2, 4)
