"""Rounds of FELICIA as the coordinator and the sites go through them: which step is which, who gets what."""

from types import SimpleNamespace

import pytest
import torch

from polyclinic.federation.call import Reply
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import carry_out
from polyclinic.methods import felicia
from polyclinic.methods.felicia import Felicia
from polyclinic.methods.shared import training_gans
from polyclinic.methods.shared.felicia import ImagesOfSites
from polyclinic.randomness import torch_rng


def reply(site, count):
    return Reply(site, (Parcel("synthetic-images", {"images": torch.zeros(count, 1, 2, 2)}),))


class Coordinator(SimpleNamespace):
    """Notes what is asked."""

    def __init__(self, sites=("a", "b"), **more):
        super().__init__(sites=sites, asked=[], told={}, round=1, rng=torch_rng, **more)

    def ask_all(self, operation, **given):
        self.asked.append((operation, given))
        return [reply(site, 2) for site in given.get("sites", self.sites)]

    def state(self, **values):
        return SimpleNamespace(**values)

    def rounds(self, count, state):
        for self.round in range(1, count + 1):
            yield self.round

    def evaluate(self):
        self.asked.append(("evaluate", {}))

    def report(self, name, value):
        self.told[name] = value


@pytest.mark.parametrize(
    ("settings", "sites", "kinds"),
    [
        ({"weight": 0.0}, ("a", "b"), ["train_alone"] * 4),
        ({}, ("a",), ["train_alone"] * 4),
        ({}, ("a", "b"), ["synchronous"] * 4),
        ({"schedule": "local"}, ("a", "b"), ["local"] * 4),
    ],
)
@pytest.mark.parametrize(("every", "worth"), [(0, [4]), (1, [1, 2, 3, 4]), (2, [2, 4]), (3, [3, 4])])
def test_each_round_goes_its_way_and_images_are_weighed_now_and_then(monkeypatch, settings, sites, kinds, every, worth):
    monkeypatch.setattr(Felicia, "synchronous_round", lambda self, f, state: f.asked.append(("synchronous", {})))
    monkeypatch.setattr(Felicia, "local_round", lambda self, f, state: f.asked.append(("local", {})))
    monkeypatch.setattr(felicia.utility, "ask_utility", lambda f, name, others: f.round)
    federation = Coordinator(sites)
    Felicia(rounds=4, weigh_every=every, **settings).run(federation)
    assert [name for name, _ in federation.asked if name != "evaluate"] == kinds
    assert federation.told == {"worth": worth}


class Central:
    def __init__(self):
        self.steps, self.learned = [], []

    def other_sites(self, site, rng):
        return site

    def step_and_gradient(self, batch, other, *, learn, act):
        self.steps.append((learn, act))
        return torch.ones(4, 1, 2, 2)

    def step(self, images, site, labels):
        self.learned.append(len(images))


@pytest.fixture
def central(monkeypatch):
    made = Central()
    batch = ImagesOfSites(torch.zeros(4, 1, 2, 2), torch.tensor([0, 0, 1, 1]), torch.zeros(4), True)
    monkeypatch.setattr(Felicia, "gather_images", lambda self, federation, replies: batch)
    monkeypatch.setattr(Felicia, "central_discriminator", lambda self, federation, state, images: made)
    monkeypatch.setattr(felicia, "_remember", lambda central, state: made.steps.append("kept"))
    return made


def test_a_synchronous_round_has_its_steps_and_the_last_is_told(central):
    federation = Coordinator()
    federation.round = 2
    Felicia(steps=3, frozen=4, warm_up=5).synchronous_round(federation, SimpleNamespace())
    assert central.steps == [(False, False), (True, False), (True, True), "kept"]  # steps 3, 4 and 5 of all
    assert [name for name, _ in federation.asked] == ["start_round"] + ["generator_step"] * 3
    assert [given["last"] for name, given in federation.asked[1:]] == [False, False, True]


def test_gradients_are_lambda_times_the_mean_of_a_sites_images():
    federation = Coordinator()
    gradient = torch.arange(5.0).reshape(5, 1, 1, 1).expand(5, 1, 2, 2)
    answers = Felicia(weight=3.0).ask_generators(federation, [reply("a", 2), reply("b", 3)], gradient, last=False)
    [(name, given)] = federation.asked
    assert (name, given["sites"], given["last"]) == ("generator_step", ["a", "b"], False)
    down = {site: sent["gradients"]["images"][:, 0, 0, 0].tolist() for site, sent in given["by_site"].items()}
    assert down == {"a": [0, 1.5], "b": [2, 3, 4]}
    assert len(answers) == 2
    assert Felicia().ask_generators(federation, [reply("a", 2)], None, last=True) == []
    assert federation.asked[1][1]["by_site"] == {}


def test_a_local_round_exchanges_every_few_steps(central):
    federation = Coordinator()
    federation.round = 2
    method = Felicia(steps=5, exchange_every=2, schedule="local", frozen=6)
    method.local_round(federation, SimpleNamespace(central={"w": torch.ones(1)}))
    begun = [(given["begin"], given["steps"], given["names"]) for _, given in federation.asked]
    assert begun == [(5, 2, ["a", "b"]), (7, 2, ["a", "b"]), (9, 1, ["a", "b"])]
    assert central.learned == [2, 2, 2, 4], "the first step of all is frozen; each image is seen once"
    assert federation.asked[0][1]["central"].kind == "generator"
    Felicia(steps=1, schedule="local").local_round(other := Coordinator(), SimpleNamespace(central={}))
    assert other.asked[0][1]["central"] is None


class Gans:
    rows = 2

    def __init__(self):
        self.done = []

    def local_step(self, gradient=None, draws=None):
        self.done.append(None if gradient is None else (gradient, draws.tolist()))

    def keep(self):
        self.done.append("kept")


def test_a_site_alone_takes_all_steps(monkeypatch):
    gans, asked = Gans(), []
    monkeypatch.setattr(training_gans, "stackable", lambda sites: [list(sites)])
    monkeypatch.setattr(Felicia, "gans_of", lambda self, group, steps: asked.append(steps) or gans)
    assert carry_out([Felicia(steps=3).train_alone(site) for site in ("a", "b")]) == [None, None]
    assert (gans.done, asked) == ([None] * 3 + ["kept"], [3])


def test_a_local_step_pays_the_central_term_when_it_acts():
    gans, asked = Gans(), []

    def image_gradient(images, site, other, labels):
        asked.append((tuple(images.shape), site.tolist(), other.tolist(), labels.tolist()))
        return torch.ones_like(images)

    central = SimpleNamespace(device="cpu", other_sites=lambda number, rng: 1 - number, image_gradient=image_gradient)
    group = [SimpleNamespace(name=name, rng=torch_rng) for name in ("b", "a")]
    method = Felicia(weight=3.0, warm_up=4)
    method.local_step(gans, group, central, ["a", "b"], 3)
    method.local_step(gans, group, central, ["a", "b"], 4)
    assert gans.done[0] is None
    gradient, others = gans.done[1]
    assert others == [0, 0, 1, 1]
    found = gradient(torch.zeros(2, 2, 1, 4, 4), torch.tensor([[0, 1], [1, 0]]), torch.tensor(others))
    assert asked == [((4, 1, 4, 4), [1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0])]
    assert found.shape == (2, 2, 1, 4, 4)
    assert float(found.max()) == 1.5


@pytest.mark.parametrize(("wire", "kind"), [("exact", torch.float32), ("small", torch.bfloat16)])
def test_gradients_travel_as_the_wire_says(wire, kind):
    assert Felicia(wire=wire).pack_gradient(torch.ones(1)).dtype == kind


def test_images_are_shared_between_sites_that_share():
    federation = Coordinator(("a",))
    assert Felicia(share_images=True).collect_images(federation) == {}
    assert Felicia().collect_images(Coordinator()) == {}
    assert federation.asked == []
