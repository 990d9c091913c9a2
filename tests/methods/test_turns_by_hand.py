"""Turns of FedER and images of FELICIA, by hand: clocks, queues, shares of a batch, and whose image is whose."""

from types import SimpleNamespace

import pytest
import torch

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Reply
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.feder import FedER, queue_of
from polyclinic.methods.shared.felicia import (
    images_of_others,
    join_images,
    labels_of,
    shared_images,
)
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


def test_idle_sites_with_work_begin_a_turn():
    federation = federation_of(fails=("c",))
    state = SimpleNamespace(now=2.0, busy={"a": 3.0}, queue={"a": 1, "b": 2, "c": 1}, turns=5)
    method = FedER(mode="asynchronous", turn_takes={"b": 1.5})
    assert method.begin_turns(federation, state, 3) == ["b"]
    assert federation.asked == [("adapt", ["b", "c"])]
    assert (state.busy, state.queue, state.turns) == ({"a": 3.0, "b": 3.5}, {"a": 1, "b": 1, "c": 1}, 6)
    assert (
        method.begin_turns(federation, SimpleNamespace(now=0, busy={}, queue={"a": 0, "b": 0, "c": 0}, turns=0), 3)
        == []
    )
    state = SimpleNamespace(now=0.0, busy={}, queue={"a": 1, "b": 1, "c": 0}, turns=0)
    assert method.begin_turns(federation, state, 1) == ["a"]
    assert state.busy == {"a": 1.0}


def test_the_clock_moves_to_the_end_of_the_next_turn(monkeypatch):
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


def test_bytes_are_those_of_a_round():
    rows = [
        ("a", "sent", "weights", "hand_over", 30),
        ("a", "received", "weights", "hand_over", 7),
        ("b", "sent", "weights", "adapt", 9),
    ]
    federation = SimpleNamespace(sites=("a", "b"), communication=SimpleNamespace(rows=lambda: rows))
    assert FedER(rounds=3).handed_over(federation) == {"a": {"weights": 10}, "b": {}}


class State(dict):
    def group(self, name):
        return {key.removeprefix(f"{name}/"): value for key, value in self.items() if key.startswith(f"{name}/")}

    def put(self, name, tensors):
        for key in [key for key in self if key.startswith(f"{name}/")]:
            del self[key]
        self.update({f"{name}/{key}": value for key, value in tensors.items()})


def site_with_queue():
    site = SimpleNamespace(state=State(), name="north")
    for number in (1, 2, 3):
        buffer = {"labels": torch.zeros(0 if number == 1 else number)}
        FedER().receive(site, buffer, {"w": torch.tensor(float(number))} if number != 2 else None)
    return site


def test_the_oldest_model_comes_first_or_the_newest_alone():
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


# --- FELICIA


def reply(site, images, labels=None):
    tensors = {"images": images, **({} if labels is None else {"labels": labels})}
    return Reply(site, (Parcel("synthetic-images", tensors),))


def coordinator(classes=2):
    trainer = SimpleNamespace(device="cpu", target=SimpleNamespace(classes=tuple(map(str, range(classes)))))
    return SimpleNamespace(trainer=trainer, sites=("a", "b", "c"))


def test_images_are_joined_with_the_number_of_their_site():
    black, white = torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.full((2, 1, 2, 2), 255, dtype=torch.uint8)
    found = join_images(coordinator(), [reply("c", black), reply("a", white)], per_class=False)
    assert found.site.tolist() == [2, 2, 0, 0]
    assert found.images.mean((1, 2, 3)).tolist() == pytest.approx([-1, -1, 1, 1])
    assert found.turns
    apart = [reply("a", black, torch.tensor([0, 1])), reply("b", white, torch.tensor([1, 0]))]
    assert not join_images(coordinator(), apart, per_class=True).turns
    in_turns = [reply("a", black, torch.tensor([0, 1])), reply("b", white, torch.tensor([0, 1]))]
    joined = join_images(coordinator(), in_turns, per_class=True)
    assert (joined.turns, joined.labels.tolist()) == (True, [0, 1, 0, 1])


@pytest.mark.parametrize(
    "labels", [None, torch.tensor([0]), torch.tensor([0.0, 1.0]), torch.tensor([0, -1]), torch.tensor([0, 2])]
)
def test_images_come_with_a_class_each(labels):
    with pytest.raises(WorkFailed, match="without a class from 0 to 1 each"):
        labels_of(reply("a", torch.zeros(2, 1, 2, 2), labels), 2)
    assert labels_of(reply("a", torch.zeros(2, 1, 2, 2), torch.tensor([1, 0])), 2).tolist() == [1, 0]


def test_everybody_gets_the_images_of_all_others():
    replies = [
        reply(name, torch.full((1, 1, 2, 2), n, dtype=torch.uint8), torch.tensor([n])) for n, name in enumerate("abc")
    ]
    given = images_of_others(replies)
    assert given["b"]["synthetic_images"].tensors["labels"].tolist() == [0, 2]
    assert given["b"]["synthetic_images"].tensors["images"].flatten().tolist() == [0] * 4 + [2] * 4
    assert images_of_others(replies[:1]) == {}
    for wrong in (torch.zeros(1, 1, 2, 2), torch.zeros(1, 2, 2, dtype=torch.uint8)):
        with pytest.raises(WorkFailed, match="it shares no uint8 images with a label each"):
            shared_images(reply("a", wrong, torch.tensor([0])))
    with pytest.raises(WorkFailed, match="it shares no uint8 images with a label each"):
        shared_images(reply("a", torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.tensor([0])))
