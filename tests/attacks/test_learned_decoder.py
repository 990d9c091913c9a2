"""Decoders of a known encoder: trained on other images, they give images back and pick the right one out of many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from polyclinic.attacks.attack import Capability
from polyclinic.attacks.decoders import LearnedDecoder, as_maps, draw_encoder, encode_images
from polyclinic.audits.recovery import pick_out
from polyclinic.errors import BadInput
from polyclinic.generators.vqvae2.autoencoder import noise_images
from polyclinic.randomness import torch_rng

FAST = {"width": 16, "steps": 150, "batch_size": 16, "lr": 5e-3}


def images(count: int, name: str) -> Tensor:
    clouds = noise_images(count, 1, 16, torch_rng("learned decoder", name))
    return 0.6 * clouds + 0.4 * torch.linspace(0, 1, 16)


@pytest.fixture(scope="module")
def encoder() -> nn.Module:
    """Batch norm in it has running statistics, as a trained network's has."""
    network = nn.Sequential(draw_encoder(1, 4, 3), nn.BatchNorm2d(draw_encoder(1, 4, 3)[-3].out_channels))
    network.train()(images(64, "statistics"))
    return network.eval()


def test_other_images_are_enough(encoder):
    own, truth, others = images(128, "own"), images(24, "truth"), images(100, "others")
    found = LearnedDecoder(**FAST).decode(encode_images(encoder, truth), encoder, own)
    guess = (found.guess - truth).square().mean()
    assert float((found.images - truth).square().mean()) < 0.5 * float(guess)
    picked = pick_out(found.images, truth, others)
    assert picked.among == 124
    assert picked.share > 0.8


def test_latents_of_other_images_point_nowhere(encoder):
    """Under the null, the right one of 124 is picked by chance."""
    own, truth, others = images(64, "own"), images(24, "truth"), images(100, "others")
    found = LearnedDecoder(**{**FAST, "steps": 40}).decode(encode_images(encoder, images(24, "else")), encoder, own)
    assert pick_out(found.images, truth, others).right <= 2


def test_vectors_are_decoded_too():
    """Pooled features have no places; their decoder has to make them up."""
    torch.manual_seed(0)
    weights = torch.randn(256, 48, generator=torch_rng("learned decoder", "vectors")) / 16
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(256, 48, bias=False))
    encoder[1].weight.data = weights.T.contiguous()
    own, truth = images(128, "own"), images(24, "truth")
    vectors = encode_images(encoder, truth)
    assert as_maps(vectors).shape == (24, 48, 1, 1)
    found = LearnedDecoder(**{**FAST, "width": 32}).decode(vectors, encoder, own)
    assert found.images.shape == truth.shape
    assert pick_out(found.images, truth, images(100, "others")).right >= 2  # by chance 0.2 of 24


def test_whole_batches_share_their_statistics(encoder):
    pictures = images(20, "own")
    assert len(encode_images(encoder, pictures, together=8)) == 16
    apart, together = encode_images(encoder, pictures[:8]), encode_images(encoder, pictures[:8], together=8)
    assert not torch.allclose(apart, together, atol=1e-3)
    assert not encoder.training


def test_what_it_needs_is_checked(encoder):
    own = images(8, "own")
    needs = LearnedDecoder().needs
    assert needs == {Capability.LATENTS, Capability.ARCHITECTURE, Capability.SIMILAR_IMAGES}
    with pytest.raises(BadInput, match="by the same encoder"):
        LearnedDecoder(**FAST).decode(torch.zeros(2, 3, 4, 4), encoder, own)


def test_picking_out_by_hand():
    truth = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).view(2, 1, 1, 2)
    others = torch.tensor([[0.5, 0.6]]).view(1, 1, 1, 2)
    assert pick_out(truth * 0.3 + 0.5, truth, others).right == 2
    assert pick_out(truth.flip(0), truth, others).right == 0
