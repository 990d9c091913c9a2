"""Scores against libraries and arithmetic; what attacks need and refuse without; pictures."""

import math
from pathlib import Path

import matplotlib.image
import pytest
import torch

from polyclinic import attacks
from polyclinic.attacks import draw_images, scoring
from polyclinic.attacks.attack import Capability, ThreatModel, verdict_word
from polyclinic.attacks.decoders import LearnedDecoder
from polyclinic.attacks.gradient_inversion.analytic import _sparse_columns, _whole
from polyclinic.attacks.near_copies import brighten
from polyclinic.errors import BadInput
from polyclinic.metrics.perceptual import perceptual_distance
from polyclinic.randomness import torch_rng


def pictures(*shape: int, name: str = "a") -> torch.Tensor:
    return torch.rand(*shape, generator=torch_rng("scoring", name), dtype=torch.float64)


def test_images_of_a_batch_are_assigned_and_starts_go_with_them():
    truth = pictures(2, 3, 1, 8, 8)
    found = torch.stack((truth[0, [2, 0, 1]], truth[1, [1, 0, 2]])) + 0.01
    result = scoring.score(found, truth, torch.full_like(truth, 5.0))
    assert result.by_assignment
    assert "paired with the truth" in str(result)
    assert result.mse.tolist() == pytest.approx([1e-4] * 6)
    # The image that came back first began in the second place: it converged if it is nearer than that start was.
    truth = torch.zeros(1, 2, 1, 8, 8)
    truth[0, 1] = 1.0
    found = torch.stack([torch.full((1, 8, 8), 0.9), torch.full((1, 8, 8), 0.4)])[None]  # swapped
    start = torch.stack([torch.full((1, 8, 8), 0.95), torch.full((1, 8, 8), 0.5)])[None]
    assert scoring.score(found, truth, start).non_converging.tolist() == [False, True]


def test_a_perceptual_distance_is_scored_beside_the_rest():
    truth = pictures(3, 1, 1, 28, 28).float()
    found = torch.stack([truth[0], 1 - truth[1], torch.full_like(truth[2], torch.nan)])
    distance = perceptual_distance()
    result = scoring.score(found, truth, torch.full_like(truth, 5.0), distance=distance)
    assert result.features == "EffLite0"
    expected = distance(found[:2, 0], truth[:2, 0]).detach()
    torch.testing.assert_close(result.perceptual[:2].float(), expected)
    assert math.isnan(result.perceptual[2])
    assert result.summary()["EffLite0"] == pytest.approx(float(expected.mean()))
    assert ", EffLite0 0." in str(result)
    assert "EffLite0" not in scoring.score(found, truth, truth).summary()


def test_who_did_not_converge():
    """Not better than the start; hopeless, though better than the start; not a number; fine."""
    truth = torch.zeros(4, 1, 1, 8, 8)
    start = torch.tensor([0.5, 9.0, 0.5, 0.5]).reshape(4, 1, 1, 1, 1).expand_as(truth)
    found = torch.tensor([0.5, 1.5, torch.nan, 0.1]).reshape(4, 1, 1, 1, 1).expand_as(truth)
    result = scoring.score(found, truth, start)
    assert result.non_converging.tolist() == [True, True, True, False]
    summary = result.summary()
    assert summary["mse"] == pytest.approx(0.01)
    assert summary["psnr"] == pytest.approx(20.0)
    assert (summary["images"], summary["non_converging"]) == (4, 3)
    assert math.isnan(result.ssim[2])
    nothing = scoring.score(torch.full_like(truth, torch.inf), truth, start)
    assert math.isnan(nothing.summary()["mse"])
    assert str(nothing).startswith("0 of 4")


@pytest.mark.parametrize(("found", "truth"), [((3, 1), (3,)), ((2, 1), (3, 1))])
def test_truth_of_another_shape_is_refused(found, truth):
    """Broadcasting would compare every image with every other one, and call that a score."""
    one, other = pictures(*found, 1, 8, 8), pictures(*truth, 1, 8, 8)
    with pytest.raises(BadInput, match=r"score: .* give all as \[N, B, C, H, W\]"):
        scoring.score(one, other, one)


def test_a_trajectory_is_scored_step_by_step():
    """Two targets with two images each that come back in the other order; the second target's first image fails."""
    truth = torch.stack([torch.full((1, 8, 8), value) for value in (0.0, 1.0, 0.2, 0.8)]).view(2, 2, 1, 8, 8)
    swapped = truth.flip(1)
    start = torch.full_like(truth, 0.5)
    images = torch.stack((start, 0.5 * start + 0.5 * swapped, swapped), 1)
    images[1, 2, 1] = 0.6  # farther from 0.2 than the start is
    found = scoring.score_trajectory(images, (0, 1, 5), truth)
    assert found.steps == (0, 1, 5)
    torch.testing.assert_close(found.mse[0], torch.tensor([0.25, 0.0625, 0.0]).double())
    assert found.non_converging.tolist() == [False, False, True, False]
    torch.testing.assert_close(found.means()["mse"], found.mse[[0, 1, 3]].mean(0))
    assert found.ssim.shape == (4, 3)


def test_identified_counts_each_image_once_beside_those_that_the_site_never_had():
    truth = torch.stack([torch.full((1, 8, 8), value) for value in (0.1, 0.5)])
    others = torch.stack([torch.full((1, 8, 8), value) for value in (0.3, 0.9, 0.7)])
    found = torch.stack([torch.full((1, 8, 8), value) for value in (0.11, 0.12, 0.89, 0.6)])
    scored = scoring.identified(found, truth, others, least=25.0)
    assert (scored.images, scored.of, scored.by_chance) == (1, 2, 1)  # 0.6 is 20 dB from 0.5
    assert scored.psnr == pytest.approx(40.0, abs=1e-3)  # the better of 0.11 and 0.12
    assert str(scored) == "1 of 2 images identified at 40.0 dB (1 by chance)"
    with pytest.raises(BadInput, match="2 images of the site need as many others; 1 were given"):
        scoring.identified(found, truth, others[:1])


def test_images_through_the_steps(tmp_path: Path):
    """A wider picture where there is a true image; what is no number or outside [0, 1] can be shown."""
    rows = {"Euclidean": torch.rand(3, 1, 8, 8), "adaptive Gaussian": torch.full((3, 1, 8, 8), torch.nan)}
    rows["Euclidean"][1] = 7
    draw_images(tmp_path / "without.png", rows, (0, 10, 100))
    draw_images(tmp_path / "with.png", rows, (0, 10, 100), torch.rand(1, 8, 8))
    without, beside = (matplotlib.image.imread(tmp_path / name).shape for name in ("without.png", "with.png"))
    assert beside[1] > without[1]
    with pytest.raises(BadInput, match="'Euclidean' has 3 images for 2 steps"):
        draw_images(tmp_path / "x.png", rows, (0, 10))


C = Capability
LATENT, BASIC = {C.LATENTS, C.ARCHITECTURE}, {C.GRADIENTS, C.ARCHITECTURE, C.BATCH_SIZE}


@pytest.mark.parametrize(("attack", "needs"), [
    (attacks.GradientInversion(), BASIC), (attacks.GradientInversion(start="given"), BASIC | {C.PRIOR}),
    (attacks.GradientInversion(label="known"), BASIC | {C.LABELS}),
    (attacks.GradientInversion(kind="weights"), BASIC - {C.GRADIENTS} | {C.WEIGHTS, C.LOCAL_TRAINING}),
    (attacks.LatentInversion(), LATENT | {C.BATCH_NORM_STATISTICS}),
    (attacks.LatentInversion(batch_norm="train"), LATENT), (attacks.PairedDecoder(), {C.LATENTS, C.PAIRED_LATENTS}),
    (LearnedDecoder(), LATENT | {C.SIMILAR_IMAGES}),
    (attacks.Projection(), {C.GENERATOR, C.CANDIDATES, C.CANDIDATE_LABELS}),
    (attacks.Projection(guessed=True), {C.GENERATOR, C.CANDIDATES}),
    (attacks.NearestSynthetic(), {C.SYNTHETIC_IMAGES, C.CANDIDATES}),
    (attacks.ShadowModels(), {C.CLASSIFIER, C.CANDIDATES, C.CANDIDATE_LABELS, C.SIMILAR_IMAGES}),
    (attacks.Fishing(), {C.GRADIENTS, C.ARCHITECTURE, C.SIMILAR_IMAGES, C.CHOSEN_WEIGHTS, C.CANDIDATES}),
])  # fmt: skip
def test_an_attack_needs_what_it_declares_and_nothing_else(attack, needs):
    assert attack.needs == needs
    attack.check(ThreatModel(granted=frozenset(needs)))
    for one in needs:
        with pytest.raises(BadInput, match=f"grant {one}"):
            attack.check(ThreatModel(granted=frozenset(needs) - {one}))
        assert one.words in str(attack)


def test_columns_with_one_more_zero_than_was_asked_for_are_found():
    columns = torch.tensor([[0.0, 0.0, 1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 0.0, 0.0, 3.0, 5.0]], dtype=torch.float64).T
    basis = torch.linalg.qr(columns)[0]
    found = _sparse_columns(basis, draws=256)
    assert found.shape == (6, 2)
    unit = columns / columns.norm(dim=0)
    assert sorted((found.T @ unit).abs().amax(1).tolist()) == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(("told", "word"), [
    *(({"verdict": "withstood"}, "withstood"), ({"verdict": "leaks"}, "leaks"), ({"leak": True}, "leaks")),
    *(({"leak": False}, "not tested"), ({"verdict": "no word", "leak": True}, "leaks"), ({}, "not tested")),
])  # fmt: skip
def test_the_word_of_a_verdict(told, word):
    assert verdict_word(told) == word


def test_counts_are_whole_and_brightness_is_added_by_hand():
    assert _whole(torch.zeros(4), 8).tolist() == [2, 2, 2, 2]
    assert _whole(torch.tensor([-1.0, 3.0]), 6).tolist() == [0, 6]
    images = torch.tensor([0.2, 0.9])
    assert brighten(images, 0.4, images, torch_rng("x")).tolist() == pytest.approx([0.6, 1.0])
