"""Turns of FedER, by hand: clocks, queues, and the share of a buffer in a batch."""

from types import SimpleNamespace

import pytest
import torch

from polyclinic.federation.site import SiteState
from polyclinic.methods.feder import FedER, mean_prediction, queue_of
from polyclinic.randomness import torch_rng


@pytest.mark.parametrize(("share", "real", "synthetic"), [(0.5, 8, 8), (1.0, 8, 0), (0.25, 4, 12), (0.8, 10, 2)])
def test_the_share_of_real_images_in_a_batch(share, real, synthetic):
    assert FedER(real_share=share).synthetic_images(real) == synthetic


def federation_of(sites=("a", "b", "c"), fails=()):
    asked = []

    def ask_all(operation, sites):
        asked.append((operation, list(sites)))
        return [SimpleNamespace(site=site) for site in sites if site not in fails]

    return SimpleNamespace(sites=tuple(sites), ask_all=ask_all, asked=asked)


def test_turns_begin_end_and_hand_models_on(monkeypatch):
    federation = federation_of(fails=("c",))
    state = SimpleNamespace(now=2.0, busy={"a": 3.0}, queue={"a": 1, "b": 2, "c": 1}, turns=5)
    method = FedER(mode="asynchronous", turn_takes={"b": 1.5})
    assert method.begin_turns(federation, state, 3) == ["b"]
    assert federation.asked == [("adapt", ["b", "c"])]
    assert (state.busy, state.queue, state.turns) == ({"a": 3.0, "b": 3.5}, {"a": 1, "b": 1, "c": 1}, 6)
    course = SimpleNamespace(now=0, busy={}, queue={"a": 0, "b": 0, "c": 0}, turns=0)
    assert method.begin_turns(federation, course, 3) == []
    state = SimpleNamespace(now=0.0, busy={}, queue={"a": 1, "b": 1, "c": 0}, turns=0)
    assert method.begin_turns(federation, state, 1) == ["a"]
    assert state.busy == {"a": 1.0}
    ended = []
    monkeypatch.setattr(FedER, "finish_turns", lambda self, federation, state, done: ended.append(done))
    state = SimpleNamespace(now=1.0, busy={"a": 3.0, "b": 2.0, "c": 2.0})
    FedER().wait(federation_of(), state)
    assert (state.now, state.busy, ended) == (2.0, {"a": 3.0}, [["b", "c"]])


def test_a_model_goes_to_the_next_one_drawn_if_the_first_fails(monkeypatch):
    tried = []
    monkeypatch.setattr(FedER, "pass_on", lambda self, federation, site, to: tried.append(to) or len(tried) == 2)
    state = SimpleNamespace(turns=0, queue={"a": 0, "b": 0, "c": 0})
    federation = federation_of()
    federation.rng = lambda name: torch_rng(name)
    FedER().finish_turns(federation, state, ["a"])
    assert sorted(tried) == ["b", "c"]
    assert state.queue == {"a": 0, "b": 0, "c": 0} | {tried[1]: 1}


def test_models_bytes_and_predictions_of_a_round_by_hand():
    rows = [
        ("a", "sent", "weights", "hand_over", 30),
        ("a", "received", "weights", "hand_over", 7),
        ("b", "sent", "weights", "adapt", 9),
    ]
    federation = SimpleNamespace(sites=("a", "b"), communication=SimpleNamespace(rows=lambda: rows))
    assert FedER(rounds=3).handed_over(federation) == {"a": {"weights": 10}, "b": {}}
    site = site_with_queue()
    assert queue_of(site) == ["came-000000001", "came-000000002", "came-000000003"]
    assert FedER().take_turn(site, only_newest=False) is None, "its buffer holds no image"
    assert float(site.state["local/w"]) == 1
    assert len(queue_of(site)) == 2
    assert len(FedER().take_turn(site, only_newest=False)["labels"]) == 2
    assert float(site.state["local/w"]) == 1, "without a model that came, the own one stays"
    other = site_with_queue()
    assert len(FedER().take_turn(other, only_newest=True)["labels"]) == 3
    assert (float(other.state["local/w"]), queue_of(other)) == (3, [])
    logits = torch.logit(torch.tensor([[[0.2]], [[0.6]]]))
    assert mean_prediction(logits, values=False).sigmoid().tolist() == [[pytest.approx(0.4)]]
    classes = torch.tensor([[[0.2, 0.8]], [[0.6, 0.4]]]).log()
    assert mean_prediction(classes, values=False).exp().tolist() == [pytest.approx([0.4, 0.6])]
    assert mean_prediction(torch.tensor([[[1.0]], [[3.0]]]), values=True).tolist() == [[2.0]]
    for sure in (90.0, -90.0):
        assert 15 < abs(float(mean_prediction(torch.full((2, 1, 1), sure), values=False))) < 17, "a logit stays finite"


def site_with_queue():
    site = SimpleNamespace(state=SiteState(), name="north")
    for number in (1, 2, 3):
        buffer = {"labels": torch.zeros(0 if number == 1 else number)}
        FedER().receive(site, buffer, {"w": torch.tensor(float(number))} if number != 2 else None)
    return site


class Clocks:
    """A federation whose sites hand models on along a ring; those that fail do not begin a turn."""

    def __init__(self, sites, fails=()):
        self.sites, self.fails, self.told, self.evaluated = sites, fails, {}, 0

    def state(self, **given):
        return SimpleNamespace(**given)

    def rounds(self, count, state):
        return range(1, count + 1)

    def rng(self, name):
        return torch_rng(name)

    def alike(self, site, successor):
        return True

    def forward(self, site, give, successor, take, model):
        ring = dict(zip(self.sites, self.sites[1:] + self.sites[:1], strict=True))
        return ring[site] == successor

    def ask_all(self, operation, sites):
        return [SimpleNamespace(site=site) for site in sites if site not in self.fails]

    def evaluate(self):
        self.evaluated += 1

    def report(self, name, figures):
        self.told[name] = figures


@pytest.mark.parametrize(("rounds", "takes", "time", "turns"), [
    (2, {"d": 3.0}, 3.0, 8),  # with a fourth site: at 1 b and c begin, at 2 c, and at 3 a has the last turn
    (1, {}, 0.0, 3),  # all begin at once, and nobody is waited for
    (2, {}, 1.0, 6),
    (4, {}, 3.0, 12),
    (2, {"c": 2.0}, 2.0, 6),  # at 1 b begins what a gave it, at 2 a and c
    (3, {"c": 2.0}, 4.0, 9),
    (3, {"c": 0.5}, 2.0, 9),  # who is quick waits for a model
])  # fmt: skip
def test_time_is_that_of_the_turns_that_a_round_waits_for(rounds, takes, time, turns):
    federation = Clocks(("a", "b", "c", *takes.keys() - {"c"}))
    FedER(mode="asynchronous", rounds=rounds, turn_takes=takes).run_asynchronously(federation)
    assert federation.evaluated == rounds
    assert federation.told["asynchronous"]["turns"] == turns
    assert federation.told["asynchronous"]["time"] == time
