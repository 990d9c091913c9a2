"""Downstream utility: networks of all training sets with one start, which is kept and released, what is told of it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.methods.shared import downstream_utility as utility
from polyclinic.models import build, initial_weights
from polyclinic.tasks import TASKS, Target
from polyclinic.training.loop import Trainer, TrainerSpec
from polyclinic.training.optimizer import Optimizer

TARGET = Target(classes=("dark", "bright"))


def make_trainer() -> Trainer:
    def builder():
        return build("lenet5", channels=1, outputs=2, size=28)

    task = TASKS["classification"](name="classification")
    optimizer = Optimizer(name="adam", lr=0.003, batch_size=8, decay_every=0)
    return Trainer(builder(), TrainerSpec(task=task, target=TARGET, optimizer=optimizer))


def first_weights() -> dict[str, torch.Tensor]:
    return initial_weights(lambda: build("lenet5", channels=1, outputs=2, size=28), 3)


def make_site(real: ImageSet, validation: ImageSet, trainer: Trainer | None = None) -> Any:
    """What `train_networks` needs of a site."""
    trainer = trainer or make_trainer()
    trainer.initial_local = first_weights()
    rng = torch.Generator().manual_seed(0)
    data = SiteData("north", real, validation, part(3, 9))
    return SimpleNamespace(data=data, trainer=trainer, lasting_rng=lambda purpose: rng.manual_seed(0))


def train_once(trainer: Trainer, train: ImageSet, validation: ImageSet, steps: int) -> utility.TrainedNetwork:
    model = trainer.load(first_weights())
    optimizer = trainer.optimizer.make(model.parameters(), 1)
    return utility.train_network(trainer, optimizer, train, validation, steps, torch.Generator().manual_seed(0))


def part(count: int, seed: int, *, flipped: bool = False) -> ImageSet:
    """Dark and bright images; the brightest are a sub-group of their own. `flipped` labels them the wrong way round."""
    rng = np.random.default_rng(seed)
    kinds = np.arange(count) % 3  # dark, bright, glaring
    images = (rng.integers(0, 30, (count, 1, 28, 28)) + 90 * kinds[:, None, None, None]).astype(np.uint8)
    labels = (kinds > 0).astype(np.int64)
    return ImageSet(images, 1 - labels if flipped else labels, subgroup=np.array(["dark", "bright", "glaring"])[kinds])


def test_training_sets_start_alike_and_the_useful_one_is_released():
    real, validation = part(6, 1), part(30, 2)
    good, bad = part(60, 3), part(60, 3, flipped=True)
    marks = {}
    for name, made in (("good", good), ("bad", bad)):
        sets = utility.training_sets(real, made, None)
        found = utility.train_networks(make_site(real, validation), sets, 20, {})
        assert set(found) == set(utility.OWN_SETS)
        marks[name] = found
    assert (
        marks["good"]["real"].score == marks["bad"]["real"].score
    )  # the same images, the same draws, the same network
    assert marks["good"]["synthetic"].score > 0.95 > 0.6 > marks["bad"]["synthetic"].score
    assert utility.choose_by_validation(marks["bad"]) == "real"


def test_a_network_is_kept_as_it_was_when_validation_liked_it_best(monkeypatch):
    trainer, seen = make_trainer(), []
    scores = iter([0.2, 0.9, 0.3, 0.9, 0.1])

    def scripted(trainer: Trainer, part: ImageSet) -> float:
        seen.append(trainer.weights())
        return next(scores)

    monkeypatch.setattr(utility, "score", scripted)
    found = train_once(trainer, part(9, 1), part(9, 2), steps=5)
    assert found.score == 0.9
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in seen[1].items())


def test_each_training_set_is_what_its_name_says(monkeypatch):
    real, synthetic, others, validation = part(6, 1), part(4, 3), part(5, 4), part(9, 2)
    used: list[ImageSet] = []

    def watch(trainer, optimizer, train, held_out, steps, rng):
        assert held_out is validation
        used.append(train)
        return utility.TrainedNetwork({}, float(torch.rand((), generator=rng)))

    monkeypatch.setattr(utility, "train_network", watch)
    sets = utility.training_sets(real, synthetic, others)
    found = utility.train_networks(make_site(real, validation), sets, 1, {})
    assert len({network.score for network in found.values()}) == 1  # all from the same draws
    wanted = ((real,), (synthetic,), (real, synthetic), (synthetic, others), (real, synthetic, others))
    assert tuple(sets) == utility.TRAINING_SETS
    for train, parts in zip(used, wanted, strict=True):
        assert np.array_equal(train.images, np.concatenate([one.images for one in parts]))
        assert train.labels.tolist() == [label for one in parts for label in one.labels.tolist()]


def test_scores_and_networks_that_are_known():
    known = {"real": utility.TrainedNetwork({"w": torch.zeros(1)}, 0.7)}
    sets = utility.training_sets(part(6, 1), part(6, 3), None)
    found = utility.train_networks(make_site(part(6, 1), part(6, 2)), sets, 2, known)
    assert found["real"] is known["real"]
    none = part(3, 2).take(np.array([], dtype=int))
    found = train_once(make_trainer(), part(9, 1), none, steps=5)
    assert found.score == 0.0
    assert any(not torch.equal(found.weights[name], tensor) for name, tensor in first_weights().items())
    score = utility.score
    assert score(trainer_of({"accuracy": 0.5, "auc": 0.75, "loss": 2.0}), None) == pytest.approx(0.75 - 2e-6, abs=1e-9)
    assert score(trainer_of({"accuracy": 0.5}), None) == 0.5
    assert score(trainer_of({"mae": 3.0, "loss": 1.0}, "mae", "lower"), None) == pytest.approx(-3 - 1e-6, abs=1e-9)
    site = SimpleNamespace(trainer=trainer_of({"accuracy": 0.5}), data=SimpleNamespace(test=images([])))
    assert np.isnan(utility.test_score(site, utility.TrainedNetwork({}, 0.0)))
    site.data.test = images([1])
    assert utility.test_score(site, utility.TrainedNetwork({}, 0.0)) == 0.5


def network(score):
    return utility.TrainedNetwork({"w": torch.tensor([score])}, score)


@pytest.mark.parametrize(("scores", "margin", "chosen"), [
    ({"real": 0.5, "augmented": 0.6}, 0.0, "augmented"),
    ({"real": 0.5, "augmented": 0.5}, 0.0, "real"),
    ({"real": 0.5, "augmented": 0.4, "synthetic": 0.9}, 0.0, "real"),
    ({"real": 0.5, "augmented": 0.5625}, 0.0625, "real"),
    ({"real": 0.5, "augmented": 0.6}, 0.0625, "augmented"),
    ({"real": 0.5, "augmented": 0.6, "augmented-all": 0.7}, 0.0, "augmented-all"),
    ({"real": 0.5, "augmented": 0.8, "augmented-all": 0.7}, 0.0, "augmented"),
    ({"real": 0.5, "augmented": 0.6, "augmented-all": 0.6, "synthetic-all": 0.9}, 0.0, "augmented"),
    ({"real": 0.7, "augmented": 0.6, "augmented-all": 0.7}, 0.0, "real"),
])  # fmt: skip
def test_synthetic_images_are_used_where_validation_says_they_helped(scores, margin, chosen):
    assert utility.choose_by_validation({name: network(score) for name, score in scores.items()}, margin) == chosen
    if not margin:
        assert utility.choose_by_validation({name: network(score) for name, score in scores.items()}) == chosen


def test_sums_and_coverage_by_hand():
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
    site = SimpleNamespace(data=SimpleNamespace(validation=images([]), test=images([]), train=images([0] * 30)))
    assert utility.measure_coverage(site, images([0] * 30)) == {}
    rng = np.random.default_rng(0)

    def noise(count):
        return ImageSet(rng.integers(0, 256, (count, 1, 4, 4), dtype=np.uint8), np.zeros(count))

    enough = utility.NEIGHBOURS + 1
    site.data = SimpleNamespace(validation=noise(3), test=noise(enough - 3), train=noise(30))
    assert set(utility.measure_coverage(site, noise(enough))) >= {"precision", "recall"}
    assert utility.measure_coverage(site, noise(enough - 1)) == {}
    site.data.validation = noise(2)
    assert utility.measure_coverage(site, noise(enough)) == {}


def images(labels, **more):
    labels = np.asarray(labels)
    pixels = np.broadcast_to(np.arange(len(labels), dtype=np.uint8)[:, None, None, None], (len(labels), 1, 4, 4))
    return ImageSet(pixels.copy(), labels, **more)


def trainer_of(metrics, metric="accuracy", better="higher"):
    task = SimpleNamespace(finish=lambda sums: metrics, metric=metric, better=better)
    return SimpleNamespace(task=task, evaluate=lambda part: {}, load=lambda weights: None)


@pytest.mark.parametrize(("tensors", "error"), [
    ({}, "not uint8"),
    ({"images": torch.zeros(2, 1, 4, 4)}, "not uint8"),
    ({"images": torch.zeros(2, 3, 4, 4, dtype=torch.uint8)}, "not uint8"),
    ({"images": torch.zeros(2, 1, 4, 4, dtype=torch.uint8)}, "give one each"),
    ({"images": torch.zeros(2, 1, 4, 4, dtype=torch.uint8), "labels": torch.zeros(1)}, "give one each"),
    ({"images": torch.zeros(2, 1, 4, 4, dtype=torch.uint8), "labels": torch.tensor([0, 2])}, "from 0 to 2"),
])  # fmt: skip
def test_images_of_others_are_like_the_sites_own_and_have_labels(tensors, error):
    site = SimpleNamespace(data=SimpleNamespace(train=images([0])), trainer=SimpleNamespace(target=TARGET))
    with pytest.raises((WorkFailed, BadInput), match=error):
        utility.received_part(site, tensors)
    fine = {"images": torch.ones(2, 1, 4, 4, dtype=torch.uint8), "labels": torch.arange(2)}
    found = utility.received_part(site, fine)
    assert (found.labels.tolist(), int(found.images.min())) == ([0, 1], 1)
