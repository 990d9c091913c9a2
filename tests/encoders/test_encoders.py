"""Encoders: features of images, the same as of the network itself, and of each image by itself."""

import pytest
import torch

from polyclinic.metrics.networks.efficientnet import efficientnet_lite0
from polyclinic.models.encoders import BATCH, ENCODERS, Encoder, features_file
from polyclinic.randomness import torch_rng


class Means(Encoder):
    width = 3

    def encode(self, images):
        return images.mean((2, 3))


def test_features_by_hand_over_several_batches():
    images = torch.arange(BATCH + 2, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 4, 4)
    found = Means().features(images)
    assert found.shape == (BATCH + 2, 3)
    assert torch.allclose(found[:, 1], torch.arange(BATCH + 2) / 255)
    assert Means().features(images[:0]).shape == (0, 3)


def test_an_encoder_has_its_own_size_of_batches(tmp_path):
    seen = []

    class Slow(Means):
        batch, identity = 2, "slow"

        def encode(self, images):
            seen.append(len(images))
            return super().encode(images)

    class Usual(Slow):
        batch = BATCH

    images = torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 4, 4)
    assert torch.equal(Slow().features(images), Means().features(images))
    assert seen == [2, 2, 2]
    Usual.__qualname__ = Slow.__qualname__
    files = [features_file(encoder, images.numpy(), tmp_path) for encoder in (Slow(), Usual())]
    assert files[0] != files[1]


@pytest.mark.slow
def test_efficientnet_lite0_gives_what_its_network_gives_at_its_own_size():
    images = torch.randint(0, 256, (2, 3, 224, 224), generator=torch_rng("encoder"), dtype=torch.uint8)
    encoder = ENCODERS["efficientnet-lite0-1280"]()
    found = encoder.features(images)
    assert found.shape == (2, encoder.width)
    assert torch.allclose(found, efficientnet_lite0().vector(images / 255), atol=1e-5)
    assert torch.allclose(found[1:], encoder.features(images[1:]), atol=1e-5)
    small = torch.randint(0, 256, (1, 1, 28, 28), generator=torch_rng("small"), dtype=torch.uint8)
    assert encoder.features(small).shape == (1, encoder.width)
