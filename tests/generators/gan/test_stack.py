"""Stacked networks compute and learn what each computes and learns alone; convolutions as matrix products."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pretended_gpu import pretend_gpu
from small_gans import make, rng, squares
from torch.nn import functional as F

from polyclinic.generators import GENERATORS
from polyclinic.generators.base import FitOptions, initial_networks
from polyclinic.generators.gan import model as gan_model
from polyclinic.generators.gan.model import Learner, StackedNetworks, fit_together
from polyclinic.generators.gan.settings import GAN
from polyclinic.tasks import Target
from polyclinic.training.gpu.graphs import WARM_UP
from polyclinic.training.gpu.stacked_layers import double_stacked, halve_stacked

TWO = Target(classes=("dark", "bright"))
CPU = torch.device("cpu")


def gan(name: str = "dcgan", **changes) -> GAN:
    return GENERATORS[name](**{"width": 2, "latent": 4, "batch_size": 4, **changes})


@given(st.integers(1, 3), st.integers(1, 13), st.sampled_from([2, 4, 8, 10]), st.booleans())
@settings(max_examples=15, deadline=None)
def test_products_are_convolutions_of_each_network(channels, outputs, side, with_bias):
    images = torch.randn(2, 3, channels, side, side, dtype=torch.float64, generator=rng(side))
    bias = torch.randn(2, outputs, dtype=torch.float64, generator=rng(1)) if with_bias else None
    down = torch.randn(2, outputs, channels, 4, 4, dtype=torch.float64, generator=rng(2))
    up = torch.randn(2, channels, outputs, 4, 4, dtype=torch.float64, generator=rng(3))
    for products, plain, weight in ((halve_stacked, F.conv2d, down), (double_stacked, F.conv_transpose2d, up)):
        each = [plain(images[m], weight[m], None if bias is None else bias[m], 2, 1) for m in (0, 1)]
        torch.testing.assert_close(products(images, weight, bias), torch.stack(each))


@pytest.mark.parametrize(("products", "shape"), [(halve_stacked, (1, 3, 2, 4, 4)), (double_stacked, (1, 2, 3, 4, 4))])
def test_gradients_of_products_and_their_gradients_are_right(products, shape):
    """Gradients are written by hand; their own gradients are what a gradient penalty needs."""
    images = torch.randn(1, 2, 2, 4, 4, dtype=torch.float64, generator=rng(), requires_grad=True)
    weight = torch.randn(*shape, dtype=torch.float64, generator=rng(1), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: products(x, w, None), (images, weight))
    assert torch.autograd.gradgradcheck(lambda x, w: products(x, w, None), (images, weight))


@pytest.mark.parametrize("as_products", [False, True])
@pytest.mark.parametrize("changes", [{}, {"discriminator_norm": "group"}, {"norm": "group"}, {"condition": "plane"}])
def test_a_stack_computes_what_each_network_computes_alone(as_products, changes):
    chosen = gan(**changes)
    shape = chosen.shape(1, 28, TWO)
    members = [initial_networks(lambda: chosen.networks(shape), seed) for seed in range(3)]
    noise, labels = torch.randn(3, 5, 4, generator=rng()), torch.randint(2, (3, 5), generator=rng(1))
    images = torch.randn(3, 5, 1, 28, 28, generator=rng(2))
    for part, inputs in (("generator", (noise, labels)), ("discriminator", (images, labels))):
        alone = torch.stack([net[part].train()(*(x[m] for x in inputs)) for m, net in enumerate(members)])
        stacked = StackedNetworks([net[part] for net in members], as_products=as_products)
        stacked.train()
        torch.testing.assert_close(stacked(*inputs), alone, rtol=1e-4, atol=1e-5)


def test_networks_of_each_class_take_turns_as_they_would_by_label():
    chosen = gan(condition="apart")
    discriminator = initial_networks(lambda: chosen.networks(chosen.shape(1, 28, TWO)), 0)["discriminator"]
    images, labels = torch.randn(6, 1, 28, 28, generator=rng()), torch.arange(6) % 2
    by_label = discriminator(images, labels)
    discriminator.in_turns = True
    torch.testing.assert_close(discriminator(images, labels), by_label)


def learner(place: int, name: str, told: list, **changes) -> Learner:
    settings = GENERATORS[name](**{"width": 2, "latent": 4, "batch_size": 4, **changes})
    model = settings.build(channels=1, size=28, target=TWO, seed=place)
    rng = torch.Generator().manual_seed(place)
    count = 8 + 4 * place  # a larger site takes more steps
    images = torch.randint(0, 256, (count, 1, 28, 28), dtype=torch.uint8, generator=rng).numpy()
    return Learner(model, images, (torch.arange(count) % 2).numpy(), rng, lambda *one: told.append((place, *one)))


@pytest.mark.parametrize(("name", "changes"), [
    *(("gan", {"critic_steps": 2}), ("wgan-gp", {}), ("privgan", {})),
    ("dcgan", {"discriminator_norm": "spectral", "augment": True, "labels": "even"}),
])  # fmt: skip
def test_a_stack_learns_what_each_learns_alone(name, changes, monkeypatch):
    monkeypatch.setattr("polyclinic.generators.gan.settings.PASSES", 2)
    told: list = []
    alone, stacked = ([learner(place, name, told, **changes) for place in (0, 1, 2)] for _ in range(2))
    wanted = [one.model.fit(one.images, one.labels, one.rng, FitOptions(report=one.progress)) for one in alone]
    reports, _ = sorted(told), told.clear()
    found = fit_together(stacked)
    assert [entry[:4] for entry in sorted(told)] == [entry[:4] for entry in reports]
    for a, b in zip(wanted, found, strict=True):
        assert b["generator"] == pytest.approx(a["generator"], rel=1e-3)
    for a, b in zip(alone, stacked, strict=True):
        for key, value in b.model.state().items():
            torch.testing.assert_close(value, a.model.state()[key], rtol=1e-2, atol=1e-4, msg=key)


@pytest.mark.parametrize("name", ["gan", "dcgan", "wgan-gp"])
def test_recorded_steps_are_the_same(name, monkeypatch):
    images, labels = squares(12)
    ends = []
    for recorded in (False, True):
        if recorded:
            pretend_gpu(monkeypatch)
            monkeypatch.setattr(gan_model, "steps_are_recorded", lambda parameters: True)
        made = make(name, steps=WARM_UP + 2)
        losses = made.fit(images, labels, rng())
        ends.append((losses, made.state()))
    (loss, plain), (other, found) = ends
    assert other == pytest.approx(loss)
    assert all(torch.equal(plain[name], found[name]) for name in plain)
