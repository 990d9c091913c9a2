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
