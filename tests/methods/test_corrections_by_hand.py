"""Corrections of gradients at sites, mixtures step by step, and who trains an encoder: by hand."""

from types import SimpleNamespace

import pytest
import torch

from polyclinic.federation.call import Call, Reply
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods import fedpft
from polyclinic.methods.feddyn import FedDyn
from polyclinic.methods.fedpft import FedPFT
from polyclinic.methods.fedprox import FedProx
from polyclinic.methods.fedreplay import FedReplay
from polyclinic.methods.moon import Moon
from polyclinic.methods.private_head import PrivateHead, clipped_sum
from polyclinic.methods.scaffold import Scaffold
from polyclinic.methods.shared import local_training
from polyclinic.randomness import torch_rng
from polyclinic.training.plans import Fitted


class State(dict):
    def group(self, name):
        return self.get(name, {})

    def put(self, name, tensors):
        self[name] = dict(tensors)


def site(name, **groups):
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(2))})
    model.cuts = ("first", "last")
    trainer = SimpleNamespace(device=torch.device("cpu"), model=model, initial_local={}, local_names=(), privacy=None)
    return SimpleNamespace(name=name, trainer=trainer, state=State(groups))


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch):
    for method in (FedProx, FedDyn, Scaffold, Moon):
        monkeypatch.setattr(method, "steps_at", lambda self, own: 2)
    monkeypatch.setattr("polyclinic.training.private.record_of", lambda *_: None)


START = {"w": torch.tensor([1.0, 1.0])}
ONES = {"w": torch.ones(2)}


def corrected(plan, weights, gradients=ONES):
    """The gradients of one step at these weights, and the correction's state after it."""
    correction = plan.spec.correction
    return correction.change(gradients, {"w": torch.tensor(weights)}, correction.given, correction.state)


def finish(work, weights, state=None, **metadata):
    """What a site half returns once its network has been trained to these weights."""
    fitted = Fitted({"w": torch.tensor(weights)}, {"samples": 4, "steps": 2, **metadata}, state or {})
    with pytest.raises(StopIteration) as stopped:
        work.send(fitted)
    return stopped.value.value


def test_fedprox_pulls_weights_back_to_the_start():
    plan = next(FedProx(mu=0.5).train(site("a"), START))
    assert plan.start == START
    assert corrected(plan, [1.0, 3.0])[0]["w"].tolist() == [1, 2]  # 1 + 0.5 (w - 1)


def test_fedprox_does_not_pull_a_layer_that_stays_at_the_site():
    plan = next(FedProx(mu=0.5).train(site("a"), {"other": torch.zeros(2)}))
    assert corrected(plan, [1.0, 3.0])[0]["w"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("before", "wanted", "after"), [(None, [1, 2], [-2, -2]), ([0.5, 0.25], [0.5, 1.75], [-1.5, -1.75])]
)
def test_feddyn_has_a_linear_term_that_follows(before, wanted, after):
    own = site("a", **({"linear": {"w": torch.tensor(before)}} if before else {}))
    work = FedDyn(alpha=0.5).train(own, START)
    plan = next(work)
    assert corrected(plan, [1.0, 3.0])[0]["w"].tolist() == wanted  # 1 - h + 0.5 (w - 1)
    assert finish(work, [5.0, 5.0]).tensors["w"].tolist() == [5, 5]
    assert own.state["linear"]["w"].tolist() == after  # h - alpha (5 - 1)


@pytest.mark.parametrize(("before", "wanted"), [(None, [4, 5]), ([1.0, 1.0], [3, 4])])
def test_scaffold_adds_the_drift_and_takes_the_mean_gradient(before, wanted):
    own = site("a", **({"control": {"w": torch.tensor(before)}} if before else {}))
    common = {"w": torch.tensor([3.0, 4.0])}
    work = Scaffold(option="II").train(own, START, common)
    gradients, state = corrected(next(work), [1.0, 1.0])
    assert gradients["w"].tolist() == wanted  # 1 + c - c_k
    assert state["w"].tolist() == [1, 1], "the sum has no drift in it"
    _, change = finish(work, [5.0, 5.0], {"w": torch.tensor([6.0, 2.0]).double()})
    assert own.state["control"]["w"].tolist() == [3, 1]  # a sum of two steps
    first = before or [0.0, 0.0]
    assert change.tensors["w"].tolist() == [3 - first[0], 1 - first[1]]


def test_weights_of_classes_are_inverse_to_their_frequency():
    assert local_training.class_weights(torch.tensor([0, 0, 0, 2]), 3).tolist() == pytest.approx([4 / 6, 0, 2])
    assert local_training.class_weights(torch.tensor([1.0, 1.0]), 2).tolist() == [0, 1]


# --- aggregation


# --- FedPFT


def test_numbers_of_images_agree(monkeypatch):
    monkeypatch.setattr(fedpft, "head_shape", lambda federation: (2, 1))
    monkeypatch.setattr(FedPFT, "width", lambda self, federation: 2)
    tensors = {"0/shares": torch.ones(1), "0/means": torch.ones(1, 2), "0/variances": torch.ones(1, 2)}
    call = Call("north", "give_mixtures", 1)

    def check(samples):
        reply = Reply("north", (Parcel("statistics", tensors, {"counts": [4], "samples": samples}),))
        FedPFT().check_reply(None, call, reply)

    check(4)
    with pytest.raises(ParcelRejected, match="are not 'samples' together"):
        check(5)


# --- FedReplay


def test_who_trains_the_encoder():
    counts = {"a": 3, "b": 9, "c": 9}
    replies = [Reply(name, (Parcel("statistics", {}, {"samples": count}),)) for name, count in counts.items()]
    federation = SimpleNamespace(sites=("a", "b", "c"), ask_all=lambda name: replies, rng=torch_rng)
    assert FedReplay(encoder_site="largest").choose(federation) == ["b", "c", "a"]
    assert FedReplay(encoder_site="c").choose(federation) == ["c"]
    drawn = FedReplay(encoder_site="random").choose(federation)
    assert sorted(drawn) == ["a", "b", "c"]
    place = int(torch.randint(3, (1,), generator=torch_rng("encoder site")))
    assert drawn[0] == federation.sites[place]


# --- MOON and private heads


@pytest.mark.parametrize("mu", [0.5, 1.0])
def test_the_contrast_is_small_near_the_common_model(mu):
    common, last = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    near, far = (float(torch.nn.functional.softplus(torch.tensor(x))) for x in (-2.0, 2.0))
    moon = Moon(mu=mu, temperature=0.5)
    assert float(moon._contrast(common, common, last)) == pytest.approx(mu * near)
    assert float(moon._contrast(last, common, last)) == pytest.approx(mu * far)


@pytest.mark.parametrize("before", [None, {"w": torch.zeros(2)}])
def test_a_site_of_moon_begins_with_the_common_model(before):
    own = site("a", **({"last": before} if before else {}))
    work = Moon().train(own, START)
    reference = next(work).spec.reference
    assert reference.cut == "last"
    assert [one["w"].tolist() for one in reference.weights] == [[1, 1], [0, 0] if before else [1, 1]]
    finish(work, [5.0, 6.0])
    assert own.state["last"]["w"].tolist() == [5, 6]


def test_the_noise_of_a_sum_is_shared_by_its_sites(monkeypatch):
    shares = []
    monkeypatch.setattr(PrivateHead, "_noisy_gradient", lambda self, own, head, share, limits=(): shares.append(share))
    monkeypatch.setattr("polyclinic.methods.private_head.honest_sites", lambda own: 4)
    own = site("a", basis={"sites": torch.tensor(9)})
    method, head = PrivateHead(), {"head": torch.zeros(1)}
    method.give_gradient(own, head)
    method.give_shared_gradient(own, head)
    method.give_share_of_sum(own, head)
    assert shares == pytest.approx([1, 1 / 3, 1 / 2])


def test_gradients_are_clipped_for_each_image_or_patient():
    slopes = torch.tensor([[3.0], [0.5], [1.0], [float("inf")]])
    vectors = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert clipped_sum(slopes, vectors, 2.0).tolist() == [[2.5, 1.0]]
    patients = torch.tensor([0, 0, 1, 2])
    assert clipped_sum(slopes, vectors, 2.0, patients).tolist() == [[2.0, 1.0]]
