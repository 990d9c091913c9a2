"""Settings of GANs, and GANs under differential privacy."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from small_gans import CLASSES, TINY, make, rng, squares

from polyclinic.generators import GENERATORS
from polyclinic.generators.base import FitOptions
from polyclinic.generators.gan.adversarial import (
    Hinge,
)
from polyclinic.generators.gan.model import private_losses
from polyclinic.privacy import dp_sgd
from polyclinic.privacy.dp_sgd import obstacles

# --- settings and privacy ----------------------------------------------------------------------------


def test_a_linear_measure_needs_something_that_bounds_it():
    with pytest.raises(ValidationError, match="set penalty = 10"):
        GENERATORS["dcgan"](loss="linear", discriminator_norm="none")


PRIVATE = {"discriminator_norm": "group", "labels": "even", "spread": False, "width": 4}


def test_what_stands_against_privacy_is_said_with_the_cure():
    reasons = [
        GENERATORS["dcgan"]().dp_obstacle(),
        GENERATORS["gan"](condition="apart").dp_obstacle(),
        GENERATORS["wgan-gp"]().dp_obstacle(),
        GENERATORS["dcgan"](discriminator_norm="group").dp_obstacle(),
        GENERATORS["gan"]().dp_obstacle(),
    ]
    assert [reason.split(":")[0] for reason in reasons] == [
        "generator.discriminator_norm",
        "generator.condition",
        "generator.penalty",
        "generator.spread",
        "generator.labels",
    ]
    for name in ("gan", "dcgan"):
        settings = GENERATORS[name](**{**TINY, **PRIVATE})
        assert settings.dp_obstacle() is None
        assert not obstacles(settings.networks(settings.shape(1, 28, CLASSES))["discriminator"])


def test_private_gradients_of_a_discriminator_are_those_of_each_image():
    """Opacus through the convolutional discriminator, against one backward pass per image."""
    torch.manual_seed(0)
    net = make("dcgan", **PRIVATE).networks["discriminator"]
    rows, labels = torch.randn(4, 1, 28, 28), torch.tensor([0, 1, 0, 1])
    real = torch.tensor([True, True, False, False])
    losses = private_losses(net, Hinge())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    expected = {name: torch.zeros_like(weight) for name, weight in net.named_parameters()}
    for i in range(4):
        net.zero_grad()
        losses(rows[i : i + 1], labels[i : i + 1], real[i : i + 1]).sum().backward()
        norm = torch.sqrt(sum(w.grad.square().sum() for w in net.parameters() if w.grad is not None))
        for name, weight in net.named_parameters():
            expected[name] += 0 if weight.grad is None else weight.grad * min(1, 0.5 / norm) / 4
    mean = dp_sgd.NoisyMean(noise=0.0, clip=0.5, expected=4, draw=dp_sgd.noise_from(torch.device("cpu"), "n"))
    with dp_sgd.private_gradients(net, optimizer, mean) as put:
        put(losses, [(rows, labels, real)])
        for name, weight in net.named_parameters():
            torch.testing.assert_close(weight.grad, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["gan", "dcgan"])
def test_with_privacy_only_the_learner_moves_the_discriminator(name):
    """The generator learns through a copy; real images reach nothing but the learner's losses."""
    images, labels = squares(8)
    model = make(name, **PRIVATE)
    before = model.state()
    seen = []

    def learn(module, losses, batch_of, schedule, joined):
        assert module is model.networks["discriminator"]
        assert joined == 4
        for _ in range(2):
            rows, known, is_real = batch_of(torch.tensor([0, 3]), torch.tensor([5, 6]))
            seen.append(int(is_real.sum()))
            assert losses(rows, known, is_real).shape == (6,)
        nobody = torch.tensor([], dtype=torch.long)
        assert batch_of(nobody, nobody)[0].shape[0] == 4

    found = model.fit(images, labels, rng(), FitOptions(private={"generator": learn}))
    assert seen == [2, 2]
    assert math.isnan(found["generator"])
    for part, tensor in model.state().items():
        if part.startswith("discriminator."):
            assert torch.equal(tensor, before[part])
    moved = [(t - before[n]).abs().max() for n, t in model.state().items() if n.startswith("generator.")]
    assert max(moved) > 1e-4  # about as far as two steps of Adam with its learning rate of 2e-4


@pytest.mark.parametrize("width", [1, 2])
def test_groups_of_one_feature_are_refused(width):
    """Their norm is 0 for every image: the generator would learn from rounding errors, or not at all."""
    with pytest.raises(ValidationError, match=rf"width {width} makes groups of one feature.* set width = 3 or more"):
        make("gan", width=width, discriminator_norm="group")
    make("dcgan", width=width, discriminator_norm="group")
