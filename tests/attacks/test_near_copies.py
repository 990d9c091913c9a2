"""Near copies: single ones are found among many, changed in several ways; honest generators pass; the power is told."""

import pytest
import torch
from torch import Tensor

from polyclinic.attacks.near_copies import (
    LADDERS,
    CopyIndex,
    add_noise,
    best_orientations,
    blur,
    brighten,
    correlations,
    mirror,
    paste_over,
    search_power,
    shift,
    smooth,
)
from polyclinic.data.datasets.phantoms.chest import ChestPhantom
from polyclinic.metrics.images import turned
from polyclinic.randomness import torch_rng

COUNT = 60


@pytest.fixture(scope="module")
def sets() -> tuple[Tensor, Tensor, Tensor]:
    """Training, held-out and other images, float in [0, 1]."""
    images = torch.from_numpy(ChestPhantom(samples=3 * COUNT, size=28, seed=1).load().images).float() / 255
    order = torch.randperm(len(images), generator=torch_rng("near copies", "sets"))
    first, second, third = (images[some] for some in order.split(COUNT))
    return first, second, third


@pytest.fixture(scope="module")
def index(sets) -> CopyIndex:
    return CopyIndex(sets[0], sets[1])


def changed(images: Tensor, others: Tensor) -> Tensor:
    """Shifted, brightened, blurred and noisy ones in turn, as in the issue."""
    rng = torch_rng("near copies", "changes")
    ways = [(shift, 0.07), (brighten, 0.2), (blur, 0.03), (add_noise, 0.03)]
    return torch.cat([ways[i % 4][0](images[i : i + 1], ways[i % 4][1], others, rng) for i in range(len(images))])


@pytest.mark.parametrize("count", [4, pytest.param(10, marks=pytest.mark.slow), 20])
def test_changed_training_images_among_forty_are_found(sets, index, count: int):
    """The old search lets all of these pass."""
    training, _, other = sets
    made = other[:40].clone()
    made[:count] = changed(training[:count], other)
    found = index.search(made)
    assert found.is_copy[:count].double().mean() >= 0.75
    assert not found.is_copy[count:].any()
    assert found.verdict().leak
    named = found.is_copy.nonzero()[:, 0]
    assert found.index[named].tolist() == named.tolist()


@pytest.mark.parametrize(
    ("change", "level"), [(mirror, 1.0), (shift, 0.11), (brighten, 0.2), (blur, 0.03), (paste_over, 0.35)]
)
def test_one_copy_is_found_and_named(sets, index, change, level: float):
    training, _, other = sets
    made = other.clone()
    made[17] = change(training[5:6], level, other, torch_rng("near copies", "one"))[0]
    found = index.search(made)
    assert found.is_copy.nonzero()[:, 0].tolist() == [17]
    assert int(found.index[17]) == 5
    assert "for instance number 17" in str(found.verdict())


@pytest.mark.parametrize("turn", [3, 6])
def test_turned_copies_are_found_in_their_orientation(sets, index, turn: int):
    image = turned(brighten(sets[0][7:8], 0.1, sets[2], torch_rng()), turn)
    found = index.search(image, among=500)
    assert found.is_copy.all()
    assert (
        torch.corrcoef(torch.stack([turned(image[0], int(found.orientation[0])), sets[0][7]]).flatten(1))[0, 1] > 0.95
    )


def test_honest_images_pass(sets, index):
    found = index.search(sets[2])
    assert not found.is_copy.any()
    assert float(found.strength.max()) < 0.8
    assert not index.search(smooth(sets[2], 1.0)).is_copy.any()


def test_images_without_contrast_are_no_copies(index):
    found = index.search(torch.zeros(3, 1, 28, 28))
    assert not found.is_copy.any()


def test_a_duplicate_between_training_and_held_out_images_raises_the_limit(sets):
    """A held-out image that is in the training set as well says that such a gap is no proof."""
    training, held_out, other = sets
    spoiled = CopyIndex(training, torch.cat([held_out[1:], brighten(training[:1], 0.05, other, torch_rng())]))
    usual = CopyIndex(training, held_out)
    assert max(spoiled.limits(40)) > 1.5 * max(usual.limits(40))


def test_the_power_says_where_the_search_stops(index):
    power = search_power(index, 300)
    assert power.weakest >= 0.8
    assert power.reach["mirrored"] == 1
    assert power.reach["shifted"] >= 0.06
    assert power.reach["shifted"] < max(LADDERS["shifted"].levels)  # beyond the reach of the search
    assert power.found["noisy"][0.2] < 0.5
    assert "a single copy is found if it is at most mirrored, shifted by" in str(power)


def test_a_correlation_is_the_best_over_shifts_by_hand():
    image = torch.rand(1, 1, 16, 16, generator=torch_rng("near copies", "by hand"))
    moved = image.roll((2, -1), (-2, -1))
    assert float(correlations(moved, image)) == pytest.approx(1, abs=1e-4)
    assert int(best_orientations(moved, image)) == 0
    assert int(best_orientations(turned(moved, 3), image)) == 1  # a quarter turn more undoes it
    assert float(correlations(moved, 1 - image)) < 0.9
