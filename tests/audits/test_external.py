"""Updates of others: doubts, and whether the images that were named are those trained on."""

import pytest
import torch
from torch import nn

from polyclinic.audits.external import distances, doubt_about, plant
from polyclinic.audits.external_files import ImageFolder, Update, UpdateSettings
from polyclinic.errors import BadInput
from polyclinic.randomness import torch_rng

IMAGES = torch.rand(4, 1, 8, 8, generator=torch_rng("outside doubts", "images"))


@pytest.fixture
def update() -> Update:
    """One step on the first image."""
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(144, 2))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch_rng("outside doubts", parameter.numel())) / 3)
    before = {name: one.detach().clone() for name, one in network.named_parameters()}
    settings = UpdateSettings(lr=0.1, weight_decay=0.0, batch_norm="eval")
    return plant(Update(network, before, before, settings, (1, 8, 8), 2), IMAGES[:1])


def test_the_true_image_explains_the_update_and_what_does_not_leaves_a_doubt(update):
    found = distances(update, IMAGES)
    assert float(found[0]) < 1e-4
    assert float(found[1:].min()) > 100 * float(found[0])
    assert "had not ended" in doubt_about(update, IMAGES[:1], IMAGES[1:2])
    assert "had not ended" in doubt_about(update, IMAGES[:1], torch.full_like(IMAGES[:1], torch.nan))
    assert doubt_about(update, IMAGES[:1], IMAGES[:1]) == ""
    # The search found the image, and it is not in the folder that was named.
    assert "none of --images does" in doubt_about(update, IMAGES[1:], IMAGES[:1])


def test_held_out_images_that_were_trained_on_are_left_out():
    pixels = (IMAGES * 255).to(torch.uint8)
    held = ImageFolder(pixels, torch.arange(4), ("a", "b", "c", "d"))
    left = held.without(ImageFolder(pixels[1:3], None, ()))
    assert left.labels.tolist() == [0, 3]
    with pytest.raises(BadInput, match="--held-out: all its images are among those trained on"):
        held.without(held)
