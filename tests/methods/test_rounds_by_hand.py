"""Rounds of methods by hand: what a coordinator makes of replies, what a site hands over, and who is selected."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.federation.call import Reply
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.private_head import PrivateHead
from polyclinic.methods.scaffold import Scaffold


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


# --- MOON -------------------------------------------------------------------------------------------


# --- FedOpt, FedDyn, Ditto --------------------------------------------------------------------------
