"""FELICIA's central discriminator: what it learns, where its gradient points, and when it acts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyclinic.generators import GENERATORS
from polyclinic.methods.felicia import Felicia
from polyclinic.methods.shared.central_discriminator import CentralDiscriminator, ImagesOfSites
from polyclinic.tasks import Target

TRAINER: Any = SimpleNamespace(
    target=Target(classes=("dark", "bright")), device=torch.device("cpu"), precision="fp32", graphs=False
)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def central(sites: int = 2, rate: float = 2e-4, **method: Any) -> CentralDiscriminator:
    settings = GENERATORS["dcgan"](width=4, latent=4, loss="log", lr=rate)
    at: Any = SimpleNamespace(generator=settings, trainer=TRAINER, seed=0)
    return CentralDiscriminator(Felicia(**method), at, (1, 1, 28, 28), sites)


def no_labels(images: Tensor) -> Tensor:
    return torch.zeros(len(images))


class Mean(nn.Module):
    """Logits of two sites from the mean of an image: the brighter, the likelier the second site's."""

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        mean = images.mean((1, 2, 3))
        return torch.stack([-4 * mean, 4 * mean], 1)


@pytest.mark.parametrize("towards", ["away", "other"])
def test_the_gradient_points_where_a_site_is_less_recognisable(towards):
    found = central(towards=towards)
    found.network = Mean()
    site = torch.tensor([0, 0, 1, 1])
    gradient = found.image_gradient(torch.zeros(4, 1, 2, 2), site, found.other_sites(site, rng()), no_labels(site))
    assert (gradient[:2] < 0).all()  # the first site's images must become brighter, so its gradient is negative
    assert (gradient[2:] > 0).all()


def test_it_learns_to_identify_sites_and_every_other_comes():
    found = central(central_lr=5e-3)
    images = torch.cat([torch.full((8, 1, 28, 28), -0.5), torch.full((8, 1, 28, 28), 0.5)])
    images = images + 0.1 * torch.randn(images.shape, generator=rng())
    site = torch.tensor([0] * 8 + [1] * 8)
    for _ in range(40):
        share = found.step(images, site, no_labels(images))
    assert float(share) == 1.0
    site = torch.tensor([0, 1, 2]).repeat(200)
    other = central(3, towards="other").other_sites(site, rng())
    assert (other != site).all()
    assert (torch.bincount(site * 3 + other, minlength=9) > 0).sum() == 6
    assert central(towards="other").other_sites(torch.tensor([0, 1]), rng()).tolist() == [1, 0]


@pytest.mark.parametrize(("learn", "act"), [(True, True), (True, False), (False, True), (False, False)])
def test_it_moves_where_it_learns_and_answers_where_it_acts(learn, act):
    found = central()
    before = [parameter.detach().clone() for parameter in found.network.parameters()]
    images, site = torch.randn(4, 1, 28, 28, generator=rng()), torch.tensor([0, 0, 1, 1])
    batch = ImagesOfSites(images, site, no_labels(images), turns=True)
    gradient = found.step_and_gradient(batch, site, learn=learn, act=act)
    after = list(found.network.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) == learn
    assert (gradient is not None) == act
    if act:
        torch.testing.assert_close(gradient, found.image_gradient(images, site, site, no_labels(images)))


def of_classes(labels: Tensor, turns: bool) -> tuple[CentralDiscriminator, ImagesOfSites]:
    images, site = torch.randn(len(labels), 1, 28, 28, generator=rng()), torch.arange(len(labels)) // 4
    return central(central="per-class"), ImagesOfSites(images, site, labels, turns)


def test_an_image_moves_only_the_discriminator_of_its_class_in_turns_or_sorted():
    found, batch = of_classes(torch.ones(8, dtype=torch.long), turns=False)
    before = [network.head.layer.weight.detach().clone() for network in found.network.of_class]
    found.step(batch.images, batch.site, batch.labels)
    after = [network.head.layer.weight for network in found.network.of_class]
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])
    labels = torch.arange(8) % 2
    found = []
    for turns in (True, False):
        one, batch = of_classes(labels, turns)
        found.append(one.step_and_gradient(batch, batch.site, learn=True, act=True))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("central", "condition", "expected"),
    [("auto", "apart", True), ("auto", "projection", False), ("one", "apart", False), ("per-class", "plane", True)],
)
def test_where_classes_are_trained_apart_each_has_a_central_discriminator(central, condition, expected):
    generator: Any = GENERATORS["dcgan"](condition=condition)
    assert Felicia(central=central).is_per_class(generator) == expected
