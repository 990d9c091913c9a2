"""Stacked owners, products instead of convolutions, the central discriminator, learners, utility."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from polyclinic.errors import BadInput
from polyclinic.generators import GENERATORS
from polyclinic.generators.base import initial_networks
from polyclinic.generators.gan.central import Central, CentralTerm
from polyclinic.generators.gan.learners import Best, Lesson, LessonNetwork, auc, teach
from polyclinic.generators.gan.losses import Log
from polyclinic.generators.gan.model import GAN
from polyclinic.generators.gan.owners import Federated, Images, Owners, StackedBatches
from polyclinic.generators.gan.stack import Stacked
from polyclinic.generators.gan.stacked_convolutions import convolve, spread_out
from polyclinic.generators.gan.trainer import Dice
from polyclinic.randomness import seed_of, torch_rng
from polyclinic.tasks import Target

TWO = Target(classes=("dark", "bright"))


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int, seed: int, size: int = 28) -> Images:
    labels = torch.arange(count) % 2
    noise = torch.randint(0, 60, (count, 1, size, size), generator=rng(seed))
    return Images((noise + 150 * labels[:, None, None, None]).to(torch.uint8), labels)


def gan(name: str = "dcgan", **changes) -> GAN:
    return GENERATORS[name](**{"width": 2, "latent": 4, "batch_size": 4, **changes})


# --- products -----------------------------------------------------------------------------------------


@given(st.integers(1, 3), st.integers(1, 13), st.sampled_from([2, 4, 8, 10]), st.booleans())
@settings(max_examples=15, deadline=None)
def test_products_are_convolutions_of_each_network(channels, outputs, side, with_bias):
    images = torch.randn(2, 3, channels, side, side, dtype=torch.float64, generator=rng(side))
    bias = torch.randn(2, outputs, dtype=torch.float64, generator=rng(1)) if with_bias else None
    down = torch.randn(2, outputs, channels, 4, 4, dtype=torch.float64, generator=rng(2))
    up = torch.randn(2, channels, outputs, 4, 4, dtype=torch.float64, generator=rng(3))
    for products, plain, weight in ((convolve, F.conv2d, down), (spread_out, F.conv_transpose2d, up)):
        each = [plain(images[m], weight[m], None if bias is None else bias[m], 2, 1) for m in (0, 1)]
        torch.testing.assert_close(products(images, weight, bias), torch.stack(each))


@pytest.mark.parametrize(("products", "shape"), [(convolve, (1, 3, 2, 4, 4)), (spread_out, (1, 2, 3, 4, 4))])
def test_slopes_of_products_and_their_slopes_are_right(products, shape):
    """Slopes are written by hand; those of slopes are what a gradient penalty needs."""
    images = torch.randn(1, 2, 2, 4, 4, dtype=torch.float64, generator=rng(), requires_grad=True)
    weight = torch.randn(*shape, dtype=torch.float64, generator=rng(1), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: products(x, w, None), (images, weight))
    assert torch.autograd.gradgradcheck(lambda x, w: products(x, w, None), (images, weight))


# --- stacks -------------------------------------------------------------------------------------------


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
        stacked = Stacked([net[part] for net in members], as_products=as_products)
        torch.testing.assert_close(stacked(*inputs), alone, rtol=1e-4, atol=1e-5)


class OneByOne:
    """The steps of `Owners` with an ordinary pair of networks for each owner, from the same draws."""

    def __init__(self, chosen: GAN, term: CentralTerm, federation: Federated) -> None:
        names = list(federation.owners)
        self.models = [chosen.build(channels=1, size=28, target=TWO, seed=federation.seed) for _ in names]
        self.duels = [model.duel() for model in self.models]
        self.dice = [Dice(torch_rng(federation.seed, name, "owners"), torch.device("cpu")) for name in names]
        held = federation.owners.values()
        self.batches = [StackedBatches([one], 4, chosen.balance, torch.device("cpu")) for one in held]
        shape = chosen.shape(1, 28, TWO)
        made = initial_networks(lambda: {"c": chosen.central(shape, len(names))}, seed_of(federation.seed, "central"))
        self.central = Central.of(made["c"], chosen.phi, term, owners=len(names), lr=chosen.lr)
        self.weight = federation.weight
        self.owner = torch.arange(len(names)).repeat_interleave(4)

    def step(self) -> None:
        fakes, wanted = [], []
        for duel, dice, batches in zip(self.duels, self.dice, self.batches, strict=True):
            real, labels = (x[0] for x in batches.next(Stacking(dice)))
            duel.judge(real, labels, labels, dice)
            wanted.append(labels)
            fakes.append(duel.make(labels, dice))
        together = torch.cat([fake.detach() for fake in fakes])
        self.central.judge(together, self.owner)
        slopes = (self.weight * self.central.slope(together, self.owner) / 4).split(4)
        for duel, dice, fake, labels, slope in zip(self.duels, self.dice, fakes, wanted, slopes, strict=True):
            duel.learn(fake, labels, dice, slope)


class Stacking(Dice):
    """Draws of one owner with the axis of owners in front."""

    def __init__(self, dice: Dice) -> None:
        super().__init__(dice.rng, dice.device)

    def uniform(self, *shape: int) -> torch.Tensor:
        return super().uniform(*shape)[None]


@pytest.mark.parametrize("as_products", [False, True])
@pytest.mark.parametrize("name", ["dcgan", "gan", "wgan-gp"])
def test_stacked_owners_learn_as_one_by_one(name, as_products):
    chosen = gan(name, critic_steps=1)
    owners = {"a": pictures(10, 1), "b": pictures(7, 2), "c": pictures(12, 3)}
    federations = [Federated(0, 2.0, owners), Federated(1, 0.5, owners)]
    stacked = Owners(chosen, CentralTerm(), federations, TWO, as_products=as_products)
    for _ in range(2):
        stacked.step()
    for place, federation in enumerate(federations):
        single = OneByOne(chosen, CentralTerm(), federation)
        for _ in range(2):
            single.step()
        for model, owner in zip(single.models, owners, strict=True):
            theirs = stacked.model(place, owner).state()
            for part, tensor in model.state().items():
                torch.testing.assert_close(theirs[part], tensor, rtol=1e-2, atol=2e-4, msg=part)


def test_lambda_0_in_a_stack_is_untouched_by_its_neighbours():
    owners = {"a": pictures(10, 1), "b": pictures(7, 2)}
    states = []
    for weight in (0.0, 5.0):
        together = Owners(gan(), CentralTerm(), [Federated(0, 0.0, owners), Federated(0, weight, owners)], TWO)
        for _ in range(2):
            together.step()
        states.append([together.pairs.state(0), together.pairs.state(2)])
    for part, tensor in states[0][0].items():
        torch.testing.assert_close(tensor, states[1][0][part], rtol=1e-4, atol=1e-5)
    assert any(not torch.allclose(t, states[1][1][n], atol=1e-4) for n, t in states[0][1].items() if "generator" in n)


def test_one_owner_in_a_stack_has_no_central_discriminator():
    alone = Owners(gan(), CentralTerm(), [Federated(0, 5.0, {"a": pictures(10, 1)})], TWO)
    assert alone.central is None
    assert "recognised" not in alone.step()


def test_balanced_batches_of_a_stack_stay_with_their_owner():
    held = [pictures(9, 1), Images(torch.full((5, 1, 28, 28), 7, dtype=torch.uint8), torch.tensor([0, 0, 0, 0, 1]))]
    batches = StackedBatches(held, 6, True, torch.device("cpu"))
    draws = Dice(rng(), torch.device("cpu"))
    draws.uniform = lambda *shape: torch.rand(2, *shape, generator=rng(9))  # type: ignore[method-assign]
    images, labels = batches.next(draws)
    assert labels.tolist() == [[0, 1, 0, 1, 0, 1]] * 2
    assert torch.allclose(images[1], torch.tensor(7 / 127.5 - 1))


# --- the central discriminator ------------------------------------------------------------------------


class Mean(nn.Module):
    """Logits of two owners from the mean of an image: the brighter, the likelier the second owner's."""

    def __init__(self) -> None:
        super().__init__()
        self.steep = nn.Parameter(torch.tensor(4.0))

    def forward(self, images, labels):
        mean = images.mean((1, 2, 3))
        return torch.stack([-self.steep * mean, self.steep * mean], 1)


def test_networks_for_each_class_do_not_stack():
    with pytest.raises(BadInput, match=r"owners: .*give each class a federation of its own"):
        Owners(gan(condition="apart"), CentralTerm(), [Federated(0, 1.0, {"a": pictures(8, 0)})], TWO)


@pytest.mark.parametrize("towards", ["away", "other"])
def test_the_slope_points_where_an_owner_is_less_recognisable(towards):
    term = CentralTerm(towards=towards)
    central = Central.of(Mean(), Log(), term, owners=2, lr=0.1)
    images, owner = torch.zeros(4, 1, 2, 2), torch.tensor([0, 0, 1, 1])
    slope = central.slope(images, owner, Dice(rng(), torch.device("cpu")))
    assert (slope[:2] < 0).all()  # the first owner's images must become brighter, so its slope is negative
    assert (slope[2:] > 0).all()


def test_the_central_discriminator_learns_to_tell_owners_apart():
    chosen = gan(width=4)
    made = initial_networks(lambda: {"c": chosen.central(chosen.shape(1, 28, TWO), 2)}, 0)["c"]
    central = Central.of(made, chosen.phi, CentralTerm(central_lr=5e-3), owners=2, lr=1e-3)
    images = torch.cat([torch.full((8, 1, 28, 28), -0.5), torch.full((8, 1, 28, 28), 0.5)])
    images = images + 0.1 * torch.randn(images.shape, generator=rng())
    owner = torch.tensor([0] * 8 + [1] * 8)
    for _ in range(40):
        share = central.judge(images, owner)
    assert float(share) == 1.0


@pytest.mark.parametrize(("own", "expected"), [(None, 0.1), (0.01, 0.01)])
def test_the_central_discriminator_may_learn_at_a_rate_of_its_own(own, expected):
    central = Central.of(Mean(), Log(), CentralTerm(central_lr=own), owners=2, lr=0.1)
    assert central.optimizer.param_groups[0]["lr"] == expected


def test_warm_up_and_frozen_steps():
    term = CentralTerm(warm_up=2, frozen=3)
    assert [term.acts(step) for step in range(4)] == [False, False, True, True]
    assert [term.learns(step) for step in range(4)] == [False, False, False, True]
    assert not CentralTerm(weight=0.0).learns(10)


# --- learners -----------------------------------------------------------------------------------------


def test_learners_learn_each_from_their_own_images():
    right = pictures(40, 1, 32)
    wrong = Images(right.images, 1 - right.labels)
    lessons = [Lesson(right, right, 0), Lesson(wrong, wrong, 1)]
    taught = teach(lessons, lambda: LessonNetwork(1, 2, 32), 2, steps=30, batch_size=8, lr=2e-3, device="cpu")
    assert (taught.scores > 0.99).all()
    said = taught.logits(right.images).argmax(-1)
    assert (said[0] == right.labels).float().mean() > 0.95
    assert (said[1] == wrong.labels).float().mean() > 0.95


def test_a_learner_is_kept_at_its_best_moment():
    """Validation that contradicts training: the first look is the best, and later steps must not count."""
    good = pictures(40, 1, 32)
    lesson = Lesson(good, Images(good.images, 1 - good.labels), 0)
    taught = teach([lesson], lambda: LessonNetwork(1, 2, 32), 2, steps=30, batch_size=8, lr=2e-3, device="cpu")
    marks = auc(taught.logits(good.images)[0].diff(dim=1)[:, 0].numpy(), good.labels.numpy() == 0)
    assert marks == pytest.approx(float(taught.scores[0]), abs=1e-3)


def test_each_learner_has_a_best_moment_of_its_own():
    stacked = Stacked([nn.Linear(1, 1), nn.Linear(1, 1)])
    best = Best(stacked, 2, torch.device("cpu"))
    for weights, scores in (([1.0, 1.0], [0.5, 0.1]), ([2.0, 2.0], [0.4, 0.9]), ([3.0, 3.0], [0.3, 0.2])):
        with torch.no_grad():
            stacked.tensors["weight"].copy_(torch.tensor(weights)[:, None, None])
        best.keep(torch.tensor(scores))
    assert best.tensors["weight"].flatten().tolist() == [1.0, 2.0]
    assert best.scores.tolist() == pytest.approx([0.5, 0.9])


def test_auc_counts_ties_half():
    assert auc(np.array([0.0, 1.0, 1.0, 2.0]), np.array([False, False, True, True])) == pytest.approx(7 / 8)
