"""Small networks, and sites that send one gradient for each of a few images."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from polyclinic.attacks.gradient_inversion.networks import LeNet, with_random_weights
from polyclinic.attacks.gradient_inversion.objective import cross_entropy
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.randomness import torch_rng


@pytest.fixture
def lenet() -> nn.Module:
    """The papers' LeNet for grey images of 16 px and 5 classes."""
    return with_random_weights(LeNet(channels=1, classes=5, size=16), torch_rng("test", "weights"))


@pytest.fixture
def smooth_images() -> Callable[..., Tensor]:
    """`smooth_images(6)`: random pictures [N, 1, 16, 16] in [0, 1] without sharp edges."""

    def draw(count: int, channels: int = 1, size: int = 16) -> Tensor:
        coarse = torch.rand(count, channels, 5, 5, generator=torch_rng("test", "images"))
        return nn.functional.interpolate(coarse, size, mode="bicubic", align_corners=False).clamp(0, 1)

    return draw


@pytest.fixture
def sent() -> Callable[..., list[Parcel]]:
    """`sent(model, images [N, B, ...], labels [N, B])`: the gradients parcel of each of N sites, in plain autograd."""

    def send(model: nn.Module, images: Tensor, labels: Tensor, classes: int = 5) -> list[Parcel]:
        parcels = []
        for batch, classes_of in zip(images, labels, strict=True):
            loss = cross_entropy(model(batch), nn.functional.one_hot(classes_of, classes).to(batch))
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            names = [name for name, _ in model.named_parameters()]
            parcels.append(Parcel("gradients", dict(zip(names, gradients, strict=True))))
        return parcels

    return send


@pytest.fixture
def one_image_each(lenet, smooth_images, sent):
    """Eight sites with an image each: (network, images [8, 1, 1, 16, 16], labels [8, 1], parcels)."""
    images = smooth_images(8)[:, None]
    labels = (torch.arange(8) % 5)[:, None]
    return lenet, images, labels, sent(lenet, images, labels)
