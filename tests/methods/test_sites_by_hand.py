"""Sites by hand: what they share, count and select, scores of several in one pass, replies that are refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.data.parts import ImageSet
from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import carry_out
from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.fedavg_share import FedAvgShare
from polyclinic.methods.fedpft import _received
from polyclinic.methods.private_head import PrivateHead
from polyclinic.methods.shared.method import Method
from polyclinic.methods.standalone import Standalone
from polyclinic.questions.inspect import InspectSites
from polyclinic.randomness import torch_rng
from polyclinic.training.plans import Score


class State(dict):
    def group(self, name):
        return self.get(name, {})

    def put(self, name, tensors):
        self[name] = dict(tensors)


# --- shared images, counts, selection ---------------------------------------------------------------


@pytest.mark.parametrize(("share", "images", "given"), [(0.5, 8, 4), (0.01, 8, 1), (0.3, 9, 3), (1.0, 5, 5)])
def test_a_site_gives_its_share_of_images_and_one_at_least(share, images, given):
    part = ImageSet(np.arange(images, dtype=np.uint8)[:, None, None, None], np.arange(images))
    site = SimpleNamespace(data=SimpleNamespace(train=part), rng=torch_rng)
    real, labels = FedAvgShare(share=share).give_share(site)
    assert len(real.tensors["images"]) == given
    numbers = labels.tensors["labels"].tolist()
    assert numbers == sorted(set(numbers)) == real.tensors["images"].flatten().tolist()


def test_everybody_gets_what_all_others_share():
    def reply(name, *numbers):
        images = torch.tensor(numbers)[:, None, None, None]
        return Reply(name, (Parcel("real-images", {"images": images}), Parcel("labels", {"labels": images.flatten()})))

    taken = {}
    federation = SimpleNamespace(
        sites=("a", "b", "c"),
        ask_all=lambda operation: [reply("a", 1, 2), reply("b", 3)],
        ask=lambda site, operation, **given: taken.update({site: given["labels"]["labels"].tolist()}),
    )
    assert int(FedAvgShare().exchange(federation)["count"]) == 3
    assert taken == {"a": [3], "b": [1, 2], "c": [1, 2, 3]}
    taken.clear()
    federation.sites, federation.ask_all = ("a",), lambda operation: [reply("a", 1, 2)]
    FedAvgShare().exchange(federation)
    assert taken == {}, "alone there is nobody to share with"


def test_intensities_lie_in_sixteenths_of_255():
    """15.94 begins the second bin, 239.06 the last one."""
    levels = [15, 16, 239, 240]
    images = np.stack([np.full((1, 2, 2), level, np.uint8) for level in levels])
    images[2, 0, 0] = 240  # a mean of 239.5
    part = ImageSet(images, np.array([0, 1, 1, 1]))
    site = SimpleNamespace(
        data=SimpleNamespace(train=part, validation=ImageSet(images[:1], np.array([0]))),
        min_cohort=0,
        trainer=SimpleNamespace(target=SimpleNamespace(classes=("no", "yes"), label_range=None)),
    )
    sent = InspectSites().survey(site).tensors
    assert sent["intensities"].tolist() == [1, 1, *[0] * 13, 2]
    assert sent["splits"].tolist() == [4, 1]
    assert sent["labels"].tolist() == [1, 3]
    assert sent["missing"].tolist() == [0]


@pytest.mark.parametrize(
    ("ranks", "best"), [([(0.5,), (0.7,), (0.6,)], 1), ([(0.5,), (0.5,)], 0), ([None, (0.1,), None], 1)]
)
def test_a_site_alone_selects_its_best_round(ranks, best):
    state = State()
    for number, rank in enumerate(ranks):
        task = SimpleNamespace(rank=lambda figures, metric, rank=rank: rank, finish=lambda sums: sums)
        state.put("local", {"w": number})
        Standalone._select(SimpleNamespace(trainer=SimpleNamespace(task=task, metric="auc"), state=state), {"sums": 1})
    assert state["best"] == {"w": best}
    Standalone._select(SimpleNamespace(trainer=SimpleNamespace(task=None), state=state), {})
    assert state["best"] == {"w": len(ranks) - 1}, "without validation images the last one"


# --- one pass over all sites ------------------------------------------------------------------------


WHOLE = {"w": torch.ones(1)}


def scoring_sites(monkeypatch, counts, **states):
    """Sites with so many validation images, one trainer for all."""
    monkeypatch.setattr(Method, "score", lambda self, site, part, weights, own: {"alone": torch.tensor(len(part))})
    loaded = []
    trainer = SimpleNamespace(
        privacy=None,
        state=lambda: WHOLE,
        load=loaded.append,
        evaluate_parts=lambda parts: [{"images": torch.tensor(len(part))} for part in parts],
    )
    sites = [
        SimpleNamespace(
            name=name, data=SimpleNamespace(validation=range(count), test=range(7)), trainer=trainer, state=State()
        )
        for name, count in counts.items()
    ]
    for site in sites:
        site.state.update(states.get(site.name, {}))
    return sites, loaded


def scores(sites, weights=None, split="validation"):
    """What each site releases when all are asked at once."""
    weights = [WHOLE] * len(sites) if weights is None else weights
    asked = zip(sites, weights, strict=True)
    found = carry_out([FedAvg().evaluate(site, weights=own, split=split) for site, own in asked])
    return [{name: int(one) for name, one in parcel.tensors.items()} if parcel else None for parcel in found]


@pytest.mark.parametrize("counts", [{"a": 3, "d": 2}, {"a": 3, "b": 0, "c": 5}, {"a": 0, "b": 0}])
def test_sites_that_score_the_same_weights_do_so_in_one_pass(monkeypatch, counts):
    sites, loaded = scoring_sites(monkeypatch, counts)
    assert scores(sites) == [{"images": n} if n else None for n in counts.values()]
    assert loaded == [WHOLE]
    assert scores(sites, split="test")[0] == {"images": 7}


@pytest.mark.parametrize(
    ("weights", "states"),
    [
        ([WHOLE, dict(WHOLE)], {}),
        ([{}, {}], {}),
        ([None, None], {}),
        ([{"other": torch.ones(1)}] * 2, {}),
        ([WHOLE, WHOLE], {"b": {"local": {"w": 1}}}),
        ([WHOLE, WHOLE], {"a": {"best": {"w": 1}}}),
    ],
)
def test_otherwise_each_is_scored_alone(monkeypatch, weights, states):
    sites, loaded = scoring_sites(monkeypatch, {"a": 1, "b": 2}, **states)
    assert scores(sites, weights) == [{"alone": 1}, {"alone": 2}]
    assert loaded == []


@pytest.mark.parametrize(
    ("method", "changes", "may"),
    [
        (FedAvg(), {}, True),
        (FedAvg(), {"stacked": "auto"}, True),
        (FedAvg(), {"stacked": "never"}, False),
        (FedAvg(), {"local_names": frozenset({"w"})}, False),
        (FedAvg(), {"task": SimpleNamespace(dense=True)}, False),
        (Standalone(), {}, False),
    ],
)
def test_one_model_without_masks_is_scored_for_all_sites(method, changes, may):
    given = {"stacked": "always", "local_names": frozenset(), "task": SimpleNamespace(dense=False), **changes}
    assert Score.may_group(method, SimpleNamespace(**given), 3, noted=False) is may
    assert not Score.may_group(method, SimpleNamespace(**given), 3, noted=True)


# --- replies that are refused -----------------------------------------------------------------------


@pytest.mark.parametrize("count", [True, -1, 1.0, "1"])
def test_numbers_of_images_are_whole_and_not_negative(count):
    with pytest.raises(WorkFailed, match="sent no number of images for each class"):
        list(_received(Parcel("statistics", {}, {"counts": [count]}), "north", 2, 1))


def test_a_call_is_of_its_operation():
    """A reply to another operation has no such tensors, and is not looked at."""
    reply = Reply("north", (Parcel("metrics", {}),))
    for method in (PrivateHead(), FedAvgShare(), InspectSites()):
        method.check_reply(None, Call("north", "evaluate", 1), reply)
