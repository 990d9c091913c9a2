"""What made images are worth, for any generator: three diets from one start, chosen on validation, by sub-group."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from polyclinic.data.parts import Part
from polyclinic.generators import GENERATORS, utility
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


def part(count: int, seed: int, *, flipped: bool = False) -> Part:
    """Dark and bright images; the brightest are a sub-group of their own. `flipped` labels them the wrong way round."""
    rng = np.random.default_rng(seed)
    kinds = np.arange(count) % 3  # dark, bright, glaring
    images = (rng.integers(0, 30, (count, 1, 28, 28)) + 90 * kinds[:, None, None, None]).astype(np.uint8)
    labels = (kinds > 0).astype(np.int64)
    return Part(images, 1 - labels if flipped else labels, subgroup=np.array(["dark", "bright", "glaring"])[kinds])


def test_diets_start_alike_and_the_useful_one_is_released():
    real, validation = part(6, 1), part(30, 2)
    good, bad = part(60, 3), part(60, 3, flipped=True)
    marks = {}
    for name, made in (("good", good), ("bad", bad)):
        found = utility.learn_all(
            make_trainer(), first_weights(), real, made, validation, steps=20, rng=torch.Generator().manual_seed(0)
        )
        assert set(found) == set(utility.DIETS)
        marks[name] = found
    assert marks["good"]["real"].score == marks["bad"]["real"].score  # the same diet, the same draws, the same network
    assert marks["good"]["synthetic"].score > 0.95 > 0.6 > marks["bad"]["synthetic"].score
    assert utility.gated(marks["bad"]) == "real"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gan", {"width": 2, "steps": 2}),
        ("dcgan", {"width": 2, "steps": 2}),
        ("wgan-gp", {"width": 2, "steps": 2}),
        ("stylegan2", {"width": 2, "steps": 1}),
        ("vqvae2", {"width": 4, "epochs": 1, "prior_epochs": 1}),
    ],
)
def test_any_generator_can_be_appraised(name, settings):
    real, held_out = part(12, 1), part(9, 2)
    model = GENERATORS[name](batch_size=4, **settings).build(channels=1, size=28, target=TARGET, seed=0)
    rng = torch.Generator().manual_seed(0)
    model.fit(real.images, real.labels, rng)
    found = utility.appraise(
        *(model, make_trainer(), first_weights(), real, held_out, part(30, 4)), images=8, steps=3, rng=rng
    )
    assert found["released"] in ("real", "augmented")
    for diet in utility.DIETS:
        assert 0 <= found[diet]["test"]["accuracy"] <= 1
        assert set(found[diet]["subgroups"]) == {"dark", "bright", "glaring"}
    assert (found["released"] == "augmented") == (found["augmented"]["validation"] > found["real"]["validation"])


def test_the_example_of_the_guide_runs():
    guide = Path(__file__).parents[2] / "docs" / "felicia.md"
    [code] = re.findall(r"```python\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL)
    for long, short in (("steps=4000", "steps=1, width=2"), ("steps=300", "steps=2"), ("size=64", "size=32")):
        assert long in code
        code = code.replace(long, short)
    grey = part(12, 1)
    some = Part(np.resize(grey.images, (12, 3, 32, 32)), grey.labels, subgroup=grey.subgroup)
    names: dict[str, Any] = dict.fromkeys(("real", "validation", "test"), some)
    exec(code.replace("images=600", "images=6"), names)
    assert set(names["found"]) == {"released", *utility.DIETS}


def test_a_network_is_kept_as_it_was_when_validation_liked_it_best(monkeypatch):
    trainer, seen = make_trainer(), []
    scores = iter([0.2, 0.9, 0.3, 0.9, 0.1])

    def scripted(trainer: Trainer, part: Part) -> float:
        seen.append(trainer.weights())
        return next(scores)

    monkeypatch.setattr(utility, "score", scripted)
    found = utility.learn(
        *(trainer, first_weights(), part(9, 1), part(9, 2)), steps=5, rng=torch.Generator().manual_seed(0)
    )
    assert found.score == 0.9
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in seen[1].items())


@pytest.mark.parametrize(("better", "metric", "sign"), [("higher", "dice", 1), ("lower", "mae", -1)])
def test_a_larger_score_is_a_better_one_whatever_the_metric(better, metric, sign):
    task = SimpleNamespace(metric=metric, better=better, finish=lambda sums: {metric: 0.25, "loss": 2.0})
    found = utility.score(SimpleNamespace(task=task, evaluate=lambda part: {}), part(3, 1))
    assert found == pytest.approx(sign * 0.25 - 2e-6, abs=1e-9)


def test_each_diet_is_what_its_name_says(monkeypatch):
    real, made, validation = part(6, 1), part(4, 3), part(9, 2)
    eaten: list[Part] = []

    def watch(trainer, initial, train, held_out, *, steps, rng):
        assert held_out is validation
        eaten.append(train)
        return utility.Learnt({}, float(torch.rand((), generator=rng)))

    monkeypatch.setattr(utility, "learn", watch)
    found = utility.learn_all(
        *(make_trainer(), first_weights(), real, made, validation), steps=1, rng=torch.Generator().manual_seed(0)
    )
    assert len({learnt.score for learnt in found.values()}) == 1  # all from the same draws
    both = np.concatenate([real.images, made.images])
    for train, images in zip(eaten, (real.images, made.images, both), strict=True):
        assert np.array_equal(train.images, images)
        assert len(train.labels) == len(images)


def test_test_images_are_not_looked_at_before_the_decision(monkeypatch):
    real, validation, test = part(6, 1), utility.joined(part(9, 2), part(3, 2)), part(12, 4)
    events: list[str] = []
    trainer = make_trainer()
    whole = trainer.evaluate

    def watch(some: Part, *more: Any) -> Any:
        events.append("validation" if some is validation else "test")
        return whole(some, *more)

    monkeypatch.setattr(trainer, "evaluate", watch)
    decide = utility.gated
    monkeypatch.setattr(utility, "gated", lambda *found: (events.append("decision"), decide(*found))[1])
    model = GENERATORS["gan"](batch_size=4, width=2).build(channels=1, size=28, target=TARGET, seed=0)
    found = utility.appraise(
        *(model, trainer, first_weights(), real, validation, test),
        images=8,
        steps=3,
        rng=torch.Generator().manual_seed(0),
    )
    at = events.index("decision")
    assert set(events[:at]) == {"validation"}
    assert set(events[at + 1 :]) == {"test"}
    assert set(found["real"]["subgroups"]) == {"dark", "bright", "glaring"}  # those of test images


def test_what_is_known_is_not_trained_again():
    known = {"real": utility.Learnt({"w": torch.zeros(1)}, 0.7)}
    found = utility.learn_all(
        *(make_trainer(), first_weights(), part(6, 1), part(6, 3), part(6, 2)),
        steps=2,
        rng=torch.Generator().manual_seed(0),
        known=known,
    )
    assert found["real"] is known["real"]


def test_subgroups_are_scored_one_by_one():
    trainer, test = make_trainer(), part(30, 4)
    learnt = utility.learn(
        *(trainer, first_weights(), part(60, 1), part(30, 2)), steps=30, rng=torch.Generator().manual_seed(0)
    )
    trainer.load(learnt.weights)
    found = utility.by_subgroup(trainer, test)
    assert set(found) == {"dark", "bright", "glaring"}
    whole = trainer.task.finish(trainer.evaluate(test))["accuracy"]
    assert np.mean([group["accuracy"] for group in found.values()]) == pytest.approx(whole)
    assert utility.by_subgroup(trainer, utility.joined(test, test)) == {}


def test_without_validation_images_the_last_moment_counts():
    none = utility.some(part(3, 2), np.array([], dtype=int))
    found = utility.learn(
        *(make_trainer(), first_weights(), part(9, 1), none), steps=5, rng=torch.Generator().manual_seed(0)
    )
    assert found.score == 0.0
    assert any(not torch.equal(found.weights[name], tensor) for name, tensor in first_weights().items())
