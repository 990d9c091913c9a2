"""FELICIA's rounds by hand: who is asked what in which step, and what gradients are handed down."""

from types import SimpleNamespace

import pytest
import torch

from polyclinic.federation.call import Reply
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods import felicia
from polyclinic.methods.felicia import Felicia
from polyclinic.methods.shared.felicia import ImagesOfSites


class Central:
    """A central discriminator that says what it was asked."""

    device = torch.device("cpu")

    def __init__(self):
        self.steps, self.acted = [], []

    def other_sites(self, site, rng):
        return site

    def step_and_gradient(self, batch, other, *, learn, act):
        self.acted.append((learn, act))
        return batch.images if act else None

    def step(self, images, site, labels):
        self.steps.append((images.flatten().tolist(), site.tolist()))

    def image_gradient(self, images, site, other, labels):
        self.seen = (images.shape, site.tolist(), other.tolist(), labels.tolist())
        return torch.full_like(images, 4.0)


class Coordinator(SimpleNamespace):
    sites = ("a", "b")

    def ask_all(self, operation, **given):
        self.asked.append((operation, given))
        return [reply("a", 1.0, 2.0), reply("b", 3.0)]

    def state(self, **given):
        return SimpleNamespace(**given)

    def rounds(self, count, state):
        return range(1, count + 1)


def reply(site, *values):
    return Reply(site, (Parcel("synthetic-images", {"images": torch.tensor(values).reshape(-1, 1, 1, 1)}),))


@pytest.fixture
def central(monkeypatch):
    found = Central()
    monkeypatch.setattr(Felicia, "central_discriminator", lambda self, federation, state, images: found)
    monkeypatch.setattr(felicia, "_remember", lambda central, state: state.remembered.append(central))
    monkeypatch.setattr(
        Felicia,
        "gather_images",
        lambda self, federation, replies: ImagesOfSites(
            torch.tensor([1.0, 2.0, 3.0]).reshape(-1, 1, 1, 1), torch.tensor([0, 0, 1]), torch.zeros(3), True
        ),
    )
    return found


def at_round(number):
    return Coordinator(round=number, asked=[], rng=lambda name: None), SimpleNamespace(central={}, remembered=[])


@pytest.mark.parametrize("number", [1, 2])
def test_images_go_up_and_gradients_come_down_in_every_step(central, number):
    """Three steps a round; the central term acts from step 2 on, and is learnt from step 4 on."""
    federation, state = at_round(number)
    Felicia(steps=3, warm_up=2, frozen=4, weight=6.0).synchronous_round(federation, state)
    assert [operation for operation, _ in federation.asked] == ["start_round", *["generator_step"] * 3]
    assert [given["last"] for _, given in federation.asked[1:]] == [False, False, True]
    first = 3 * (number - 1)
    assert central.acted == [(step >= 4, step >= 2) for step in range(first, first + 3)]
    down = federation.asked[3][1]["by_site"]
    # lambda times the gradient, over the images of the site
    assert down["a"]["gradients"]["images"].flatten().tolist() == [6 * 1 / 2, 6 * 2 / 2]
    assert down["b"]["gradients"]["images"].flatten().tolist() == [6 * 3]
    assert federation.asked[1][1]["by_site"].keys() == (set() if number == 1 else down.keys())
    assert state.remembered == [central]


def test_a_round_ends_where_nobody_answers_any_more(central, monkeypatch):
    monkeypatch.setattr(Felicia, "ask_generators", lambda self, *given, **more: [])
    federation, state = at_round(1)
    Felicia(steps=3).synchronous_round(federation, state)
    assert len(central.acted) == 1
    assert state.remembered == [central]


def test_weights_come_down_every_few_steps_and_all_images_are_learnt_once(central):
    """Five steps a round, two between exchanges: 5 and 6, 7 and 8, and 9; steps before 6 are not learnt."""
    federation, state = at_round(2)
    state.central = {"w": torch.ones(1)}
    Felicia(steps=5, exchange_every=2, frozen=6, schedule="local").local_round(federation, state)
    given = [one for _, one in federation.asked]
    assert [(one["begin"], one["steps"]) for one in given] == [(5, 2), (7, 2), (9, 1)]
    assert all(one["names"] == ["a", "b"] and one["central"].kind == "generator" for one in given)
    # of each site every second image in a step; the first of both in the first one
    assert central.steps == [([2.0], [0]), ([1.0, 3.0], [0, 1]), ([2.0], [0]), ([1.0, 2.0, 3.0], [0, 0, 1])]
    assert len(state.remembered) == 3
    federation, state = at_round(1)
    Felicia(steps=1, schedule="local").local_round(federation, state)
    assert federation.asked[0][1]["central"] is None


# --- at the sites -----------------------------------------------------------------------------------


class GANs:
    rows = 2

    def __init__(self, names):
        self.names, self.steps = names, []

    def local_step(self, image_gradient=None, draws=None):
        self.steps.append((image_gradient, draws))

    def keep(self):
        self.kept = len(self.steps)

    def sample(self, count):
        return [(name, count) for name in self.names]


def sites_of(*names):
    generator = SimpleNamespace(batch_size=4)
    return [SimpleNamespace(name=name, rng=lambda purpose: None, generator=generator) for name in names]


def test_a_local_step_has_lambda_times_the_gradient_of_the_mean():
    gans, central = GANs(["b", "a"]), Central()
    method = Felicia(weight=6.0, warm_up=3)
    method.local_step(gans, sites_of("b", "a"), central, ["a", "b"], step=2)
    assert gans.steps == [(None, None)]
    method.local_step(gans, sites_of("b", "a"), central, ["a", "b"], step=3)
    gradient, draws = gans.steps[1]
    assert draws.tolist() == [1, 1, 0, 0]
    fake = torch.zeros(2, 2, 1, 4, 4)
    found = gradient(fake, torch.tensor([[0, 1], [2, 3]]), draws)
    assert found.shape == fake.shape
    assert set(found.flatten().tolist()) == {6.0 * 4 / 2}, "over the two images of a site"
    assert central.seen == ((4, 1, 4, 4), [1, 1, 0, 0], [1, 1, 0, 0], [0, 1, 2, 3])
