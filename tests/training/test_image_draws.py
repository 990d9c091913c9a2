"""Draws of each image of a private batch: by the image, whatever other images are there."""

import numpy as np
import pytest
import torch
from torch import nn

from polyclinic.data.parts import ImageSet
from polyclinic.errors import WorkFailed
from polyclinic.training.augmentation import augment
from polyclinic.training.image_draws import dropout_by_row, image_names, image_seeds, joined_seeds, uniform

IMAGES = np.random.default_rng(0).integers(0, 255, (6, 1, 4, 4), dtype=np.uint8)
LABELS = np.arange(6) % 2


def test_an_images_name_does_not_depend_on_the_others():
    names = image_names(ImageSet(IMAGES, LABELS))
    kept = [0, 1, 3, 4, 5]
    assert image_names(ImageSet(IMAGES[kept], LABELS[kept])) == [names[place] for place in kept]
    assert image_names(ImageSet(IMAGES, 1 - LABELS)) != names
    assert len(set(names)) == 6


def test_seeds_belong_to_the_image_and_the_address():
    names = image_names(ImageSet(IMAGES, LABELS))
    seeds = image_seeds(names, torch.tensor([4, 2]), 0, "north", 1)
    assert seeds.tolist() == image_seeds(names, torch.tensor([2, 4]), 0, "north", 1).flip(0).tolist()
    assert not set(seeds.tolist()) & set(image_seeds(names, torch.tensor([4, 2]), 0, "north", 2).tolist())
    assert joined_seeds(3, 0, "north").tolist()[:2] == joined_seeds(2, 0, "north").tolist()


def test_augmentation_by_seeds_is_the_same_in_any_company():
    images = torch.from_numpy(IMAGES).float()
    seeds = torch.arange(100, 106)
    together, _ = augment(images, None, ("flip", "turn"), seeds)
    for row in range(6):
        alone, _ = augment(images[row : row + 1], None, ("flip", "turn"), seeds[row : row + 1])
        assert torch.equal(alone[0], together[row])
    flipped, _ = augment(images, None, ("flip",), seeds)
    assert [torch.equal(a, b.flip(-1)) for a, b in zip(flipped, images, strict=True)] == [False, True] * 3


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.Dropout2d(0.5)])
def test_dropout_by_row_is_the_same_in_any_company_and_keeps_the_mean(layer):
    network, rows = nn.Sequential(layer), torch.ones(400, 8, 3, 3)
    seeds = torch.arange(400)
    with dropout_by_row(network, seeds):
        together = network(rows)
    with dropout_by_row(network, seeds[7:8]):
        assert torch.equal(network(rows[7:8])[0], together[7])
    assert set(together.unique().tolist()) == {0.0, 2.0}
    assert float(together.mean()) == pytest.approx(1.0, abs=0.1)
    if isinstance(layer, nn.Dropout2d):
        assert bool((together == together[:, :, :1, :1]).all())
    assert not torch.equal(network(rows), together)  # afterwards torch draws again
    network.eval()
    with dropout_by_row(network, seeds):
        assert torch.equal(network(rows), rows)


def test_two_layers_and_two_passes_drop_differently():
    network, rows = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), torch.ones(4, 64)
    with dropout_by_row(network, torch.arange(4)):
        first, second = network[0](rows), network[0](rows)
        other = network[1](rows)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)


def test_dropout_over_anything_but_images_is_refused():
    network = nn.Sequential(nn.Flatten(0, 1), nn.Dropout(0.5))
    with (
        pytest.raises(WorkFailed, match="drops numbers of 12 rows where a batch has 4 images"),
        dropout_by_row(network, torch.arange(4)),
    ):
        network(torch.ones(4, 3, 5))


def test_no_rows_have_no_numbers():
    assert uniform(torch.empty(0, dtype=torch.int64), 3, purpose="x").shape == (0, 3)
