"""Downstream utility: networks from three training sets with one start, the best of several checks on validation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.methods.shared import utility
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


@pytest.mark.parametrize(("better", "metric", "sign"), [("higher", "dice", 1), ("lower", "mae", -1)])
def test_a_larger_score_is_a_better_one_whatever_the_metric(better, metric, sign):
    task = SimpleNamespace(metric=metric, better=better, finish=lambda sums: {metric: 0.25, "loss": 2.0})
    found = utility.score(SimpleNamespace(task=task, evaluate=lambda part: {}), part(3, 1))
    assert found == pytest.approx(sign * 0.25 - 2e-6, abs=1e-9)


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
    both = np.concatenate([real.images, synthetic.images])
    of_all = np.concatenate([synthetic.images, others.images])
    wanted = (real.images, synthetic.images, both, of_all, np.concatenate([real.images, of_all]))
    assert tuple(sets) == utility.TRAINING_SETS
    for train, images in zip(used, wanted, strict=True):
        assert np.array_equal(train.images, images)
        assert len(train.labels) == len(images)


def test_what_is_known_is_not_trained_again():
    known = {"real": utility.TrainedNetwork({"w": torch.zeros(1)}, 0.7)}
    sets = utility.training_sets(part(6, 1), part(6, 3), None)
    found = utility.train_networks(make_site(part(6, 1), part(6, 2)), sets, 2, known)
    assert found["real"] is known["real"]


def test_without_validation_images_the_last_moment_counts():
    none = part(3, 2).take(np.array([], dtype=int))
    found = train_once(make_trainer(), part(9, 1), none, steps=5)
    assert found.score == 0.0
    assert any(not torch.equal(found.weights[name], tensor) for name, tensor in first_weights().items())


def test_validation_chooses_the_better_of_the_two_sets_with_synthetic_images():
    def chosen(**scores: float) -> str:
        networks = {name.replace("_", "-"): utility.TrainedNetwork({}, score) for name, score in scores.items()}
        return utility.choose_by_validation(networks)

    assert chosen(real=0.5, augmented=0.6, augmented_all=0.7, synthetic_all=0.9) == "augmented-all"
    assert chosen(real=0.5, augmented=0.6, augmented_all=0.6) == "augmented"
    assert chosen(real=0.7, augmented=0.6, augmented_all=0.7) == "real"
