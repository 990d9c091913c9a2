"""Networks that learn from synthetic images at a site, by hand: which is kept, which is released, what is told."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.data.parts import ImageSet
from polyclinic.federation.call import Reply
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.shared import utility

# --- which network is released ------------------------------------------------------------------------


def network(score):
    return utility.TrainedNetwork({"w": torch.tensor([score])}, score)


@pytest.mark.parametrize(
    ("scores", "margin", "chosen"),
    [
        ({"real": 0.5, "augmented": 0.6}, 0.0, "augmented"),
        ({"real": 0.5, "augmented": 0.5}, 0.0, "real"),
        ({"real": 0.5, "augmented": 0.4, "synthetic": 0.9}, 0.0, "real"),
        ({"real": 0.5, "augmented": 0.5625}, 0.0625, "real"),
        ({"real": 0.5, "augmented": 0.6}, 0.0625, "augmented"),
        ({"real": 0.5, "augmented": 0.6, "augmented-all": 0.7}, 0.0, "augmented-all"),
        ({"real": 0.5, "augmented": 0.8, "augmented-all": 0.7}, 0.0, "augmented"),
    ],
)
def test_synthetic_images_are_used_where_validation_says_they_helped(scores, margin, chosen):
    assert utility.choose_by_validation({name: network(score) for name, score in scores.items()}, margin) == chosen
    if not margin:
        assert utility.choose_by_validation({name: network(score) for name, score in scores.items()}) == chosen


@pytest.mark.parametrize(
    ("scores", "validation", "best"),
    [((1, 5, 3, 5, 2), 4, 2), ((5, 1, 1, 1, 1), 4, 1), ((1, 2, 3, 4, 5), 4, 5), ((), 0, 5)],
)
def test_a_network_is_kept_as_it_was_at_its_best_check(monkeypatch, scores, validation, best):
    """The first of equals; the last of all where there is nothing to score."""
    steps, given = [], iter(scores)
    monkeypatch.setattr(utility, "score", lambda trainer, part: float(next(given)))
    trainer = SimpleNamespace(
        batches=lambda train, rng: "batches",
        train=lambda batches, some, optimizer: steps.append(some),
        weights=lambda: {"checks": torch.tensor(len(steps))},
    )
    found = utility.train_network(trainer, None, None, [0] * validation, 10, None)
    assert steps == [2] * 5
    assert int(found.weights["checks"]) == best
    assert found.score == (max(scores) if scores else 0.0)


def test_training_sets_have_those_of_other_sites_where_they_came():
    def part(*labels):
        return ImageSet(np.zeros((len(labels), 1, 2, 2), np.uint8), np.array(labels))

    def labels(sets):
        return {name: own.labels.tolist() for name, own in sets.items()}

    own = {"real": [1], "synthetic": [2], "augmented": [1, 2]}
    assert labels(utility.training_sets(part(1), part(2), None)) == own
    more = {"synthetic-all": [2, 3], "augmented-all": [1, 2, 3]}
    assert labels(utility.training_sets(part(1), part(2), part(3))) == own | more


class Kept(dict):
    """A site's state: numbers, and groups of tensors."""

    def group(self, name):
        return self.get(f"group {name}", {})

    def put(self, name, tensors):
        self[f"group {name}"] = tensors


def trained_twice(monkeypatch, first, second):
    """A site that trains in two rounds; what it was told to know in each."""
    rounds, known = iter((first, second)), []

    def train_networks(site, sets, steps, kept):
        known.append({name: one.score for name, one in kept.items()})
        return {name: network(score) for name, score in next(rounds).items()} | dict(kept)

    monkeypatch.setattr(utility, "train_networks", train_networks)
    monkeypatch.setattr(utility, "training_sets", lambda *given: {})
    site = SimpleNamespace(state=Kept(), data=SimpleNamespace(train=None))
    selection = utility.Selection(steps=10)
    found = [utility.train_and_keep(site, None, selection) for _ in range(2)]
    return site, known, found[1]


def test_the_best_network_of_all_rounds_is_kept_and_real_images_are_learnt_once(monkeypatch):
    first, second = {"real": 0.5, "synthetic": 0.7, "augmented": 0.4}, {"synthetic": 0.6, "augmented": 0.8}
    site, known, found = trained_twice(monkeypatch, first, second)
    assert known == [{}, {"real": 0.5}]
    assert {name: one.score for name, one in found.items()} == {"synthetic": 0.7, "augmented": 0.8, "real": 0.5}
    assert float(site.state["score-synthetic"]) == 0.7
    assert float(site.state.group("diet-augmented")["w"]) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("release", "chosen"), [(None, "augmented"), ("synthetic", "synthetic"), ("augmented-all", "augmented")]
)
def test_a_training_set_that_the_study_names_is_released_where_it_is_there(monkeypatch, release, chosen):
    networks = {"real": network(0.5), "synthetic": network(0.25), "augmented": network(0.75)}
    monkeypatch.setattr(utility, "train_and_keep", lambda *given: networks)
    monkeypatch.setattr(utility, "draw_sheet", lambda *given: None)
    monkeypatch.setattr(utility, "test_score", lambda site, own: float("nan") if own.score == 0.25 else own.score + 1)
    monkeypatch.setattr(utility, "measure_coverage", lambda *given: {"recall": 0.125})
    site = SimpleNamespace(state=Kept())
    found = utility.evaluate(site, None, utility.Selection(steps=1, release=release))
    assert utility.TRAINING_SETS[int(site.state["released"])] == chosen
    assert site.state.group("local") == site.state.group("best") == networks[chosen].weights
    assert {name: float(value) for name, value in found.tensors.items()} == {
        **{"validation_real": 0.5, "validation_synthetic": 0.25, "validation_augmented": 0.75},
        **{"test_real": 1.5, "test_augmented": 1.75, "recall": 0.125},
    }


# --- test metrics -------------------------------------------------------------------------------------


def test_sums_on_test_images_are_told_in_all_and_by_sub_group():
    part = ImageSet(np.zeros((3, 1, 2, 2), np.uint8), np.array([1, 2, 4]), subgroup=np.array(["f", "m", "f"]))
    trainer = SimpleNamespace(load=lambda weights: None, evaluate=lambda own: {"sum": torch.tensor(own.labels.sum())})
    site = SimpleNamespace(data=SimpleNamespace(test=part), trainer=trainer)
    found = utility.test_sums(site, {})
    assert {name: int(value) for name, value in found.tensors.items()} == {"/sum": 7, "f/sum": 5, "m/sum": 2}
    site.data.test = ImageSet(part.images, part.labels)
    assert {name: int(value) for name, value in utility.test_sums(site, {}).tensors.items()} == {"/sum": 7}
    site.data.test = ImageSet(part.images[:1], part.labels[:1])
    assert {name: int(value) for name, value in utility.test_sums(site, {}).tensors.items()} == {"/sum": 1}
    site.data.test = ImageSet(part.images[:0], part.labels[:0])
    assert utility.test_sums(site, {}) is None


def federation_with(states):
    task = SimpleNamespace(
        add=lambda a, b: {name: a[name] + b[name] for name in a},
        finish=lambda sums: {name: float(value) for name, value in sums.items()},
    )

    def ask_all(operation, *, counted=True, weights=None, by_site=None):
        if weights is None:
            return [Reply("a", (Parcel("metrics", {"auc": torch.tensor(0.12345678).double()}),))]
        size = float(weights["w"])
        return [
            Reply(site, (Parcel("metrics", {"/n": torch.tensor(size), "f/n": torch.tensor(2 * size)}),))
            for site in ("a", "b")
        ]

    return SimpleNamespace(
        round=3,
        sites=list(states),
        simulated_state=states.get,
        trainer=SimpleNamespace(task=task),
        ask_all=ask_all,
    )


def test_networks_of_every_training_set_are_tried_at_all_sites():
    weights = {"w": torch.tensor(1.0)}
    states = {
        "north": Kept({"group diet-real": weights, "group diet-augmented-all": weights, "released": torch.tensor(4)}),
        "south": Kept(),
    }
    federation = federation_with(states)
    scored = {"test": {"n": 2.0}, "subgroups": {"f": {"n": 4.0}}}
    assert utility.test_metrics(federation, "try", weights) == scored
    assert utility.test_metrics(federation, "try", {}) == {}
    assert utility.test_tables(federation, "try") == {
        "north": {
            **{"real": scored, "synthetic": {}, "augmented": {}, "augmented-all": scored},
            "released": "augmented-all",
        },
        "south": {},
    }
    del states["north"]["released"]
    assert utility.test_tables(federation, "try")["north"]["released"] == ""
