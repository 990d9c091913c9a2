"""Copies among made images, against a library and on generators that copy or do not."""

import pytest
import torch
from torch import Tensor

from polyclinic.attacks.copies import find_copies
from polyclinic.data.datasets.phantoms.chest import ChestPhantom
from polyclinic.errors import BadInput
from polyclinic.generators.vqvae2.autoencoder import noise_images
from polyclinic.metrics.images import orientations_of, turned
from polyclinic.metrics.perceptual import Pixels, nearest, table
from polyclinic.randomness import torch_rng


def clouds(count: int, name: str, size: int = 16) -> Tensor:
    return noise_images(count, 1, size, torch_rng("copies", name))


@pytest.fixture(scope="module")
def sets() -> tuple[Tensor, Tensor, Tensor]:
    """Training, held-out and other images of the same kind: chests of as many scanners, drawn by Polyclinic."""
    images = torch.from_numpy(ChestPhantom(samples=180, size=28, seed=1).load().images)
    order = torch.randperm(180, generator=torch_rng("copies", "sets"))
    first, second, third = (images[some] for some in order.split(60))
    return first, second, third


@pytest.mark.parametrize("orientation", range(8))
def test_training_images_are_found_in_every_orientation(sets: tuple, orientation: int):
    training, held_out, _ = sets
    made = turned(training[10:40], orientation)
    found = find_copies(made, training, held_out)
    assert found.is_copy.all()
    assert found.training.index.tolist() == list(range(10, 40))
    for image, which, original in zip(made, found.training.orientation, training[10:40], strict=True):
        assert torch.equal(turned(image, int(which)), original)
    assert found.verdict().leak
    assert found.authenticity == 0


def test_one_mirrored_copy_among_honest_images_is_found_and_named(sets: tuple):
    training, held_out, other = sets
    made = other.clone()
    made[17] = training[5].flip(-1)
    found = find_copies(made, training, held_out)
    assert found.is_copy.nonzero()[:, 0].tolist() == [17]
    assert "number 17, which mirrored is training image 5" in str(found.verdict())


def test_images_between_training_images_are_told_by_their_share():
    """No copies, but half a training image each: the generator leans on what it saw."""
    training, held_out, other = (clouds(60, name) for name in ("training", "held out", "other"))
    found = find_copies(0.55 * training + 0.45 * other, training, held_out)
    assert not found.is_copy.any()
    assert found.closer_share > 0.75
    assert found.chance <= 0.001
    assert found.verdict().leak
    assert "no made image is a copy, but" in str(found.verdict())


def test_held_out_images_presented_as_made_ones_pass(sets: tuple):
    training, held_out, other = sets
    for made in (held_out, other):
        found = find_copies(made, training, held_out)
        assert not found.is_copy.any()
        assert not found.verdict().leak
        assert found.authenticity > 0.2


def test_chance_is_even_for_honest_generators():
    """Under the null, no more than a tenth of the generators should have a chance below a tenth."""
    low = 0
    for number in range(30):
        made, training, held_out = (clouds(20, f"{name}{number}", 8) for name in ("made", "training", "held out"))
        low += find_copies(made, training, held_out).chance <= 0.1
    assert low <= 7  # more than 7 of 30 happen once in 80 times


def test_the_table_is_the_least_distance_over_orientations():
    first, second = clouds(3, "first"), clouds(4, "second")
    found = table(first, second, Pixels())
    for i in range(3):
        for j in range(4):
            errors = [float((turned(first[i], o) - second[j]).square().mean()) for o in range(8)]
            assert found.distances[i, j] == pytest.approx(min(errors), rel=1e-4)
            assert errors[int(found.orientation[i, j])] == pytest.approx(min(errors), rel=1e-4)


def test_nearest_and_ratio_by_hand():
    others = torch.tensor([0.0, 0.4, 1.0])[:, None, None, None].expand(-1, 1, 4, 4)
    found = nearest(torch.full((1, 1, 4, 4), 0.3), others, Pixels())
    assert found.index.tolist() == [1]
    assert found.distance.tolist() == pytest.approx([0.01], rel=1e-4)
    assert found.ratio.tolist() == pytest.approx([0.01 / 0.09], rel=1e-4)
    alone = nearest(torch.full((1, 1, 4, 4), 0.3), others[:1], Pixels())
    assert alone.ratio.isnan().all()
    twice = nearest(torch.zeros(1, 1, 4, 4), torch.zeros(2, 1, 4, 4), Pixels())
    assert twice.ratio.tolist() == [1]  # as near to two images: that is no copy of one


def test_images_that_are_not_square_are_not_turned_on_their_side():
    flat = torch.rand(3, 1, 4, 6, generator=torch_rng("copies", "flat"))
    assert orientations_of(flat) == (0, 2, 4, 6)
    assert table(flat, flat.flip(-1), Pixels()).distances.diagonal().max() < 1e-6


def test_duplicates_between_training_and_held_out_images_are_named():
    training = clouds(30, "training")
    found = find_copies(clouds(5, "made"), training, training)
    assert "drop duplicates" in str(found.verdict())


def test_bad_input_is_named():
    good = clouds(20, "good")
    with pytest.raises(BadInput, match="held-out images: have shape"):
        find_copies(good, good, clouds(20, "good", 8))
    with pytest.raises(BadInput, match="give 20 of each"):
        find_copies(good, good, good[:5])
    with pytest.raises(BadInput, match="made images: have shape"):
        find_copies(good[:, 0], good, good)
    with pytest.raises(BadInput, match="give uint8, or float"):
        find_copies(good, good * torch.nan, good)
