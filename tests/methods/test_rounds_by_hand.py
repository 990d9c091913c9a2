"""Rounds of methods by hand: what a coordinator makes of replies, what a site hands over, and who is selected."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.data.parts import ImageSet
from polyclinic.federation.call import Reply
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.feddyn import FedDyn
from polyclinic.methods.fedopt import FedOpt
from polyclinic.methods.moon import Moon
from polyclinic.methods.private_head import PrivateHead
from polyclinic.methods.scaffold import Scaffold
from polyclinic.training import plans


class State(dict):
    def group(self, name):
        return self.get(name, {})

    def put(self, name, tensors):
        self[name] = dict(tensors)


class Coordinator(SimpleNamespace):
    """A federation of two sites whose replies are written down, one list for each round."""

    sites = ("a", "b")

    def state(self, **given):
        self.kept = SimpleNamespace(**given)
        return self.kept

    def rounds(self, count, state):
        return range(1, count + 1)

    def ask_all(self, operation, **given):
        self.asked = [*getattr(self, "asked", []), (operation, given)]
        return self.replies[len(self.asked) - 1]

    def evaluate(self, weights):
        self.scored = [*getattr(self, "scored", []), weights]


# --- private heads ----------------------------------------------------------------------------------

BASIS = {"mean": torch.tensor([1.0, 2.0]), "matrix": torch.tensor([[2.0], [1.0]])}


def private_run(monkeypatch, rounds, **settings):
    """Each round two sites send gradients 1 and 3 of 2 and 6 images, for one slope and the constant."""
    model = SimpleNamespace(outputs=1)
    monkeypatch.setattr("polyclinic.methods.private_head._encoded", lambda given: model)
    replies = [
        [
            SimpleNamespace(metadata={"expected": 2.0}, gradients={"head": torch.tensor([[1.0, 0.0]])}),
            SimpleNamespace(metadata={"expected": 6.0}, gradients={"head": torch.tensor([[3.0, 8.0]])}),
        ]
    ] * rounds
    federation = Coordinator(
        replies=replies,
        once=lambda name, work: BASIS,
        trainer=SimpleNamespace(model=model, privacy=SimpleNamespace(max_grad_norm=0.25)),
        sums=SimpleNamespace(settings=SimpleNamespace(sum=settings.pop("sum", "float"))),
    )
    found = PrivateHead(rounds=rounds, server_lr=0.5, beta=0.5, bias=0.25, **settings).run(federation)
    return federation, found


def heads_by_hand(rounds):
    """Gradients of 0.5 and 1 an image; a rate of 0.5 / 0.25; momentum 0.5."""
    head, velocity, heads = np.zeros(2), np.zeros(2), []
    for _ in range(rounds):
        velocity = 0.5 * velocity + np.array([4.0, 8.0]) / 8
        head = head - 2 * velocity
        heads.append(head)
    return heads


@pytest.mark.parametrize(("average", "averaged"), [(0.5, 2), (0.0, 1), (1.0, 4), (0.75, 3), (0.3, 2)])
def test_the_private_head_is_the_mean_of_the_last_rounds(monkeypatch, average, averaged):
    federation, found = private_run(monkeypatch, 4, average=average)
    mean = np.mean(heads_by_hand(4)[-averaged:], axis=0)
    slope = mean[0] * np.array([2.0, 1.0])
    assert found["fc.weight"].tolist() == [pytest.approx(slope.tolist())]
    assert found["fc.bias"].tolist() == [pytest.approx(0.25 * mean[1] - slope @ [1.0, 2.0])]
    assert len(federation.scored) == 1, "the mean is there at the end only"
    assert torch.equal(federation.scored[0]["fc.weight"], found["fc.weight"])
    assert federation.kept.averaged == averaged
    assert federation.asked[1][1]["statistics"]["head"].tolist() == [pytest.approx(heads_by_hand(1)[0].tolist())]


@pytest.mark.parametrize(
    ("noise", "summed", "operation"),
    [
        ("each-site", "float", "give_gradient"),
        ("each-site", "secure", "give_gradient"),
        ("shared", "float", "give_shared_gradient"),
        ("shared", "secure", "give_share_of_sum"),
    ],
)
def test_who_adds_the_noise_follows_from_the_sum(monkeypatch, noise, summed, operation):
    federation, _ = private_run(monkeypatch, 1, noise=noise, sum=summed)
    assert [asked for asked, _ in federation.asked] == [operation]


def test_features_are_projected_around_the_mean_of_the_basis(monkeypatch):
    features = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
    monkeypatch.setattr("polyclinic.methods.private_head.features_of", lambda site, part: features)
    site = SimpleNamespace(state=State(basis=BASIS))
    assert PrivateHead(bias=0.25).project(site, None).tolist() == [[0, 0.25], [4, 0.25]]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_private_head_scores_any_number_of_images(monkeypatch, count):
    features = torch.tensor([[1.0, 2.0], [2.0, 4.0]])[:count]
    monkeypatch.setattr("polyclinic.methods.private_head.features_of", lambda site, part: features)
    task = SimpleNamespace(
        targets=lambda labels: labels,
        observe=lambda output, targets, target: output,
        sums=lambda output, targets, cases, target: {"outputs": output, "cases": cases},
    )
    trainer = SimpleNamespace(task=task, target=None, within_bounds=lambda observed, targets: observed)
    part = ImageSet(np.zeros((count, 1, 1, 1), np.uint8), np.zeros(count), cases=np.arange(count))
    weights = {"fc.weight": torch.tensor([[1.0, 10.0]]), "fc.bias": torch.tensor([0.5])}
    found = PrivateHead().score(SimpleNamespace(trainer=trainer), part, weights, "none")
    assert found.keys() == ({"outputs", "cases"} if count else set())
    if count:
        assert found["outputs"].flatten().tolist() == [21.5, 42.5][:count]
        assert found["cases"].tolist() == list(range(count))


# --- SCAFFOLD ---------------------------------------------------------------------------------------


def test_the_control_moves_by_the_share_of_sites_that_replied():
    """Three of four sites reply, two of them as one sum; the controls of those that did change by 1 and 4."""

    def reply(site, weight, change, **more):
        parts = (Parcel("weights", {"w": torch.tensor([weight])}), Parcel("gradients", {"w": torch.tensor([change])}))
        return Reply(site, tuple(Parcel(one.kind, one.tensors, {"samples": 1, **more}) for one in parts))

    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(1))})
    federation = Coordinator(
        replies=[[reply("a", 3.0, 1.0, sites=2), reply("b", 5.0, 4.0)], [reply("a", 4.0, 0.0)]],
        initial_weights=lambda: {"w": torch.tensor([1.0])},
        trainer=SimpleNamespace(model=model),
    )
    federation.sites = ("a", "b", "c", "d")
    found = Scaffold(rounds=2, server_lr=0.5).run(federation)
    first, second = (given for _, given in federation.asked)
    assert first["gradients"]["w"].tolist() == [0]
    assert second["weights"]["w"].tolist() == [1 + 0.5 * (4 - 1)]
    assert second["gradients"]["w"].tolist() == [3 / 4 * 2.5]
    assert federation.kept.control["w"].tolist() == [3 / 4 * 2.5]
    assert found["w"].tolist() == [2.5 + 0.5 * (4 - 2.5)]


@pytest.mark.parametrize(("steps", "rate"), [(None, 1.0), (3, 0.3), (10, 1.0), (25, 1.0)])
def test_a_control_may_be_as_large_as_ten_steps_allow(monkeypatch, steps, rate):
    rates = []
    checks = "polyclinic.methods.scaffold.reply_checks."
    monkeypatch.setattr(f"{checks}check_step", lambda call, reply, found: rates.append(found))
    monkeypatch.setattr(f"{checks}check_like", lambda *given: None)
    monkeypatch.setattr("polyclinic.methods.fedavg.FedAvg.check_reply", lambda *given: None)
    trainer = SimpleNamespace(model=torch.nn.Linear(1, 1), optimizer=SimpleNamespace(lr=0.1))
    method, federation = Scaffold(local_steps=steps), SimpleNamespace(trainer=trainer)
    method.check_reply(federation, SimpleNamespace(operation="evaluate"), None)
    assert rates == []
    method.check_reply(federation, SimpleNamespace(operation="train"), None)
    assert rates == [pytest.approx(rate)]


# --- MOON -------------------------------------------------------------------------------------------


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2))

    def forward(self, images):
        return images * self.w


class Network(torch.nn.Module):
    cuts = ("early", "last")

    def __init__(self):
        super().__init__()
        self.front, self.rest = Scale(), torch.nn.Identity()


def cosine(one, other):
    return float(one @ other / one.norm() / other.norm())


@pytest.mark.parametrize("mu", [0.5, 1.0])
@pytest.mark.parametrize("last", [None, [0.2, 1.0]])
def test_the_loss_of_moon_by_hand(monkeypatch, mu, last):
    network = Network()

    def load(weights):
        network.front.w.data = weights["w"].clone()
        return network

    monkeypatch.setattr(plans, "split", lambda model, cut: (model.front, model.rest) if cut == "last" else None)
    monkeypatch.setattr(Moon, "fit_spec", lambda self, site, weights: plans.FitSpec(3))
    trainer = SimpleNamespace(
        load=load,
        model=network,
        autocast=contextlib.nullcontext,
        loss=lambda output, targets: output.sum(),
        initial_local={},
    )
    state = State() if last is None else State(last={"w": torch.tensor(last)})
    common = {"w": torch.tensor([1.0, 0.5])}
    plan = next(Moon(mu=mu, temperature=0.25).train(SimpleNamespace(trainer=trainer, state=state), common))
    assert plan.start == common
    assert plan.spec.steps == 3
    loss = plans._with_reference(trainer, plan.spec.reference)
    network.front.w.data = torch.tensor([2.0, 3.0])  # after some steps
    images = torch.tensor([[1.0, 1.0], [2.0, -1.0]])
    own, near, far = (images * torch.tensor(w) for w in ([2.0, 3.0], [1.0, 0.5], last or [1.0, 0.5]))
    gaps = [cosine(o, f) - cosine(o, n) for o, n, f in zip(own, near, far, strict=True)]
    added = np.mean([np.log1p(np.exp(gap / 0.25)) for gap in gaps])
    assert float(loss(images, None)) == pytest.approx(float(own.sum()) + mu * added, rel=1e-5)


# --- FedOpt, FedDyn, Ditto --------------------------------------------------------------------------


def test_squares_of_adam_and_adagrad():
    before, new = torch.tensor([1.0, 4.0]), torch.tensor([3.0, 0.5])
    assert FedOpt(server_optimizer="adam", beta2=0.75)._squares(before, new).tolist() == [1.5, 3.125]
    assert FedOpt(server_optimizer="adagrad")._squares(before, new).tolist() == [4, 4.5]


@pytest.mark.parametrize(("alpha", "wanted"), [(0.0, 3.0), (1.0, 4.0), (0.5, 4.0)])
def test_feddyn_without_its_terms_is_the_mean(alpha, wanted):
    """Of two sites one replies: h = - alpha / 2 (3 - 1), and the mean moves by - h / alpha."""
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(1))})
    federation = SimpleNamespace(trainer=SimpleNamespace(model=model), sites=("a", "b"))
    state = SimpleNamespace(weights={"w": torch.tensor([1.0])})
    reply = Reply("a", (Parcel("weights", {"w": torch.tensor([3.0])}, {"samples": 1}),))
    assert FedDyn(alpha=alpha).combine(federation, state, [reply])["w"].tolist() == [wanted]
    assert hasattr(state, "h") is (alpha > 0)
