"""Decoders of latents: with the encoder, with pairs, and with nothing but images."""

import pytest
import torch
from torch import Tensor, nn

from polyclinic.attacks.decoders import (
    LearnedDecoder,
    PairedDecoder,
    SurrogateDecoder,
    as_maps,
    draw_encoder,
    encode_images,
    principal_maps,
)
from polyclinic.audits.recovery import pick_out
from polyclinic.errors import BadInput
from polyclinic.generators.vqvae2.autoencoder import noise_images
from polyclinic.randomness import torch_rng

FAST = {"width": 16, "steps": 120, "batch_size": 16, "lr": 5e-3}


def images(count: int, name: str) -> Tensor:
    """Random clouds over a slope that all share, as medical images share a layout."""
    clouds = noise_images(count, 1, 16, torch_rng("decoder", name))
    return 0.6 * clouds + 0.4 * torch.linspace(0, 1, 16)


def drawn(seed: int = 5) -> nn.Module:
    return draw_encoder(1, 2, seed)


@torch.no_grad()
def encoded(network: nn.Module, pictures: Tensor) -> Tensor:
    return network(pictures)


def test_pairs_give_images_back_and_surrogates_without_structure_or_weights():
    own, truth = images(128, "own"), images(32, "truth")
    unknown = drawn()
    found = PairedDecoder(**FAST).run(encoded(unknown, truth), own, encoded(unknown, own))
    error = (found.images - truth).square().mean()
    guess = (found.guess - truth).square().mean()
    assert float(error) < 0.3 * float(guess)
    assert int(found.score(truth).non_converging.sum()) == 0
    assert found.images.shape == truth.shape
    own, truth = images(128, "own"), images(64, "truth")
    found = SurrogateDecoder(**FAST, surrogates=6, components=3).run(encoded(drawn(7), truth), own)
    error = (found.images - truth).square().mean()
    assert float(error) < 0.5 * float((found.guess - truth).square().mean())
    assert "structure and weights of the encoder are unknown" in found.threat_model


def test_drawn_encoders_differ_and_principal_maps_do_not_know_channels_apart():
    for factor in (1, 2, 4, 8):
        assert draw_encoder(3, factor, 1)(torch.rand(2, 3, 32, 32)).shape[2:] == (32 // factor, 32 // factor)
    kernels = {
        tuple(layer.kernel_size for layer in draw_encoder(1, 4, i) if isinstance(layer, nn.Conv2d)) for i in range(9)
    }
    assert len(kernels) > 1
    # Channels in another order, another sign and size, and a constant: the same maps.
    latents, layout = encoded(drawn(), images(16, "own")), torch.linspace(0, 1, 8).expand(8, 8)
    order = torch.randperm(latents.shape[1], generator=torch_rng("order"))
    signs = 1 - 2 * (torch.arange(latents.shape[1]) % 2)
    sizes = (torch.linspace(0.5, 3, latents.shape[1]) * signs)[:, None, None]
    changed = latents[:, order] * sizes + 7
    first, second = principal_maps(latents, 3, layout), principal_maps(changed, 3, layout)
    torch.testing.assert_close(first, second, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(first.square().mean((0, 2, 3)), torch.ones(3), rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused():
    own = images(4, "own")
    with pytest.raises(BadInput, match="are no maps"):
        SurrogateDecoder().run(torch.zeros(2, 3), own)
    with pytest.raises(BadInput, match="by the same encoder"):
        PairedDecoder().run(torch.zeros(2, 3, 4, 4), own, torch.zeros(4, 5, 4, 4))
    with pytest.raises(BadInput, match="make maps of 8 x 8, and the parcel holds 5 x 5"):
        SurrogateDecoder().run(torch.rand(8, 3, 5, 5), own)


def test_a_training_that_broke_is_tried_again_more_slowly(monkeypatch):
    """Latents from which nothing was learnt look like latents that tell nothing, which would reassure falsely."""
    rates: list[float] = []

    def train_at(self, lr, sets, images, seed, device):
        rates.append(lr)
        broken = nn.Sequential(nn.Flatten(), nn.Linear(4, 4)).requires_grad_(False)
        broken[1].weight.fill_(torch.nan if len(rates) == 1 else 0.0 if len(rates) == 2 else 1.0)
        return broken

    monkeypatch.setattr(PairedDecoder, "_train_at", train_at)
    maps = torch.rand(6, 1, 2, 2, generator=torch_rng("broken decoder"))
    PairedDecoder(lr=0.5)._train([maps], torch.rand(6, 1, 2, 2), 0, "cpu")
    assert rates == [0.5, 0.1, 0.02]


@pytest.fixture(scope="module")
def encoder() -> nn.Module:
    """Batch norm in it has running statistics, as a trained network's has."""
    network = nn.Sequential(draw_encoder(1, 4, 3), nn.BatchNorm2d(draw_encoder(1, 4, 3)[-3].out_channels))
    network.train()(images(64, "statistics"))
    return network.eval()


def test_other_images_are_enough_and_latents_of_others_point_nowhere(encoder):
    own, truth, others = images(128, "own"), images(24, "truth"), images(100, "others")
    found = LearnedDecoder(**FAST).decode(encode_images(encoder, truth), encoder, own)
    guess = (found.guess - truth).square().mean()
    assert float((found.images - truth).square().mean()) < 0.5 * float(guess)
    picked = pick_out(found.images, truth, others)
    assert picked.among == 124
    assert picked.share > 0.8
    # Under the null, the right one of 124 is picked by chance.
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


def test_picking_out_by_hand():
    truth = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).view(2, 1, 1, 2)
    others = torch.tensor([[0.5, 0.6]]).view(1, 1, 1, 2)
    assert pick_out(truth * 0.3 + 0.5, truth, others).right == 2
    assert pick_out(truth.flip(0), truth, others).right == 0
