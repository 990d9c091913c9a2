"""Latent inversion: early latents give images back, deeper ones less; any cut, batch norm in either mode, parcels."""

import math

import pytest
import torch
from quick_backbones import QUICK
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from polyclinic.attacks.latent_inversion import LatentInversion, read_latents
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.ledger.wire import shrink
from polyclinic.generators.vqvae2.autoencoder import noise_images
from polyclinic.models import Backbone, build, cuts, initial_weights, split
from polyclinic.randomness import torch_rng

SIZE = 20


def network(backbone: str = "small-cnn", size: int = SIZE, channels: int = 1) -> Backbone:
    """Weights as drawn, batch norm with statistics as after some training."""
    model = build(backbone, channels=channels, outputs=2, size=size)
    model.load_state_dict(initial_weights(lambda: build(backbone, channels=channels, outputs=2, size=size), 1))
    rng = torch_rng("latents", "statistics")
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.running_mean.normal_(0, 0.1, generator=rng)
            layer.running_var.uniform_(0.5, 1.5, generator=rng)
    return model.eval()


def images(count: int = 4, size: int = SIZE, channels: int = 1) -> Tensor:
    return noise_images(count, channels, size, torch_rng("latents", "images"))


def test_first_layer_is_inverted_far_better_than_any_other_image_and_deeper_is_harder():
    truth, model = images(), network()
    other = 10 * math.log10(1 / float((truth - truth.roll(1, 0)).square().mean()))
    attack = LatentInversion(iterations=150)
    found = {}
    for cut in cuts("small-cnn"):
        front, _ = split(model, cut)
        found[cut] = attack.run(front(truth).detach(), front, (1, SIZE, SIZE)).score(truth).summary()
    assert found["conv1"]["psnr"] > other + 25
    assert found["conv1"]["ssim"] > 0.99
    assert found["conv1"]["psnr"] > found["conv2"]["psnr"] + 5
    assert found["conv2"]["psnr"] > other
    assert found["conv1"]["by_assignment"] is False


@pytest.mark.parametrize(("backbone", "cut"), [(name, cut) for name in QUICK for cut in cuts(name)])
def test_every_cut_of_every_backbone_can_be_attacked(backbone: str, cut: str):
    front, _ = split(network(backbone, 32, 3), cut)
    truth = images(2, 32, 3)
    found = LatentInversion(iterations=2).run(front(truth).detach(), front, (3, 32, 32))
    assert found.images.shape == truth.shape
    assert found.loss.isfinite().all()
    assert 0 <= found.images.min() <= found.images.max() <= 1


def test_steps_are_those_of_adamw_on_equation_two():
    front, _ = split(network(), "conv1")
    latents = front(images(2)).detach()
    attack = LatentInversion(iterations=6, total_variation=0.01, decay_at=(), weight_decay=0.1, lr=0.01)
    found = attack.run(latents, front, (1, SIZE, SIZE))
    x = found.start.clone().requires_grad_()
    optimizer = torch.optim.AdamW([x], lr=0.01, weight_decay=0.1)
    losses = []
    for _ in range(8):
        matching = (front(x) - latents).square().flatten(1).sum(1) / latents.square().flatten(1).sum(1)
        steps = [x.diff(dim=dim).abs().flatten(1).mean(1) for dim in (-1, -2)]
        loss = matching + 0.01 * (steps[0] + steps[1])
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
        with torch.no_grad():
            x.clamp_(0, 1)
    assert losses[0].mean() > found.loss.mean()
    assert any(torch.allclose(found.loss, step, rtol=1e-4) for step in losses[5:])


def test_a_result_does_not_depend_on_its_neighbours():
    front, _ = split(network(), "conv2")
    latents = front(images(3)).detach()
    attack = LatentInversion(iterations=20)
    together = attack.run(latents, front, (1, SIZE, SIZE))
    alone = attack.run(latents[2:], front, (1, SIZE, SIZE))
    in_turns = LatentInversion(iterations=20, at_once=2).run(latents.flip(0), front, (1, SIZE, SIZE))
    torch.testing.assert_close(together.images[2:], alone.images, atol=1e-4, rtol=0)
    torch.testing.assert_close(together.images, in_turns.images.flip(0), atol=1e-4, rtol=0)
    assert torch.equal(together.start[2], alone.start[0])
    other_seed = attack.run(latents, front, (1, SIZE, SIZE), seed=1)
    assert not torch.equal(together.start, other_seed.start)


def test_batches_normalised_by_themselves():
    """SplitNN's sites are in training mode: whoever takes them for being in evaluation mode gets less."""
    truth = images(6)
    front, _ = split(network(), "conv1")
    front.train()
    latents = torch.cat([front(batch).detach() for batch in truth.split(3)])
    front.eval()
    right = LatentInversion(iterations=150, batch_norm="train").run(latents, front, (1, SIZE, SIZE), together=3)
    wrong = LatentInversion(iterations=150).run(latents, front, (1, SIZE, SIZE))
    assert right.score(truth).psnr.mean() > wrong.score(truth).psnr.mean() + 5
    assert right.together == 3
    assert len(right.loss) == 2
    assert "training mode" in right.threat_model
    with pytest.raises(BadInput, match="whole batches"):
        LatentInversion(batch_norm="train").run(latents[:4], front, (1, SIZE, SIZE), together=3)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_parcels_of_latents_in_every_precision(precision: str):
    truth = images(2)
    front, _ = split(network(), "conv1")
    parcel = Parcel("latents", shrink(front(truth), precision))
    found = LatentInversion(iterations=100).run(read_latents(parcel), front, (1, SIZE, SIZE))
    assert found.score(truth).psnr.min() > 25


def test_activations_are_read_as_they_are_and_latents_of_another_encoder_refused():
    front, _ = split(network(), "conv1")
    sent = front(images(3)).detach()
    assert torch.equal(read_latents(Parcel("activations", {"activations": sent})), sent)
    with pytest.raises(BadInput, match="holds no latents"):
        read_latents(Parcel("weights", {"weights": torch.zeros(1)}))
    front, _ = split(network(), "conv1")
    with pytest.raises(BadInput, match="the encoder and the image shape"):
        LatentInversion().run(torch.zeros(2, 64, 5, 5), front, (1, SIZE, SIZE))


def test_the_encoder_is_left_as_it_was():
    front, _ = split(network(), "conv1")
    front.train()
    before = {name: tensor.clone() for name, tensor in front.state_dict().items()}
    for mode in ("train", "eval"):
        LatentInversion(iterations=2, batch_norm=mode).run(torch.zeros(2, 32, 10, 10), front, (1, SIZE, SIZE))
    assert front.training
    assert all(parameter.requires_grad for parameter in front.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in front.state_dict().items())
