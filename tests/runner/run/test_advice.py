"""Signs of a poor result are said with the cure, while a run goes on and in its result; a good one is left alone."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.cli.tables import print_result
from polyclinic.data.partitions.base import Column
from polyclinic.data.parts import PreparedSites
from polyclinic.data.source import AtSites
from polyclinic.methods.analytic import Analytic
from polyclinic.runner.run import advice
from polyclinic.runner.run.advice import Watch
from polyclinic.runner.run.recorder import Display
from polyclinic.runner.run.run import run
from polyclinic.tasks import TASKS

CLASSIFICATION = TASKS["classification"](name="classification")
REGRESSION = TASKS["regression"](name="regression")
SEGMENTATION = TASKS["segmentation"](name="segmentation")


def counts(train, validation=100):
    return {"counts": {"north": {"train": train, "validation": validation, "test": 50}}}


def reply(confusion):
    return SimpleNamespace(metrics={"confusion": torch.tensor(confusion), "count": torch.tensor(1)}, parcels=[1])


def test_few_steps_a_round_are_said_and_a_fitting_study_gets_no_advice(tiny):
    assert list(advice.before(tiny("fedavg", {"evaluation.select": "best"}), counts(train=400))) == []
    deployed = AtSites(dataset="chest", classes=["clear", "pneumonia"]).info(("north", "south"))
    assert list(advice.before(tiny("fedavg", {"evaluation.select": "best"}), deployed)) == []
    (said,) = advice.before(tiny("fedavg", rounds=4), counts(train=60))
    assert said.startswith("a site takes 7 steps a round at most, 28 in all; lower optimizer.batch_size")
    assert "method.rounds" not in said  # more rounds do not make a round longer
    assert list(advice.before(tiny("fedavg", rounds=71), counts(train=60))) != []
    assert list(advice.before(tiny("fedavg", rounds=72), counts(train=60))) == []  # 504 steps
    assert list(advice.before(tiny("fedavg", local_epochs=2), counts(train=60))) == []
    assert list(advice.before(tiny("fedavg", {"optimizer.batch_size": 4}), counts(train=60))) == []
    assert list(advice.before(tiny("fedsgd"), counts(train=60))) == []  # one gradient a round is the method


@pytest.mark.parametrize(("ill", "said"), [(0, True), (2, True), (9, False)])
def test_a_class_that_is_nearly_the_hospital_is_said(tiny, ill, said):
    study = tiny("fedavg", local_epochs=9)
    info = {"class_counts": {"north": {"train": [40 - ill, ill]}, "south": {"train": [0, 30]}}}
    of_hospitals = study.model_copy(update={"sites": Column(partition="column")})
    found = list(advice.before(of_hospitals, info))
    assert [one.startswith("the site alone tells the class of") for one in found] == [True] * said
    assert list(advice.before(study, info)) == [], "a study that spreads images itself may mean it"


@pytest.mark.parametrize(("settings", "info", "said"), [
    ({"optimizer.batch_size": 64}, counts(60), ["site 'north' has 60 training images, fewer than one batch of 64"]),
    ({"evaluation.select": "best"}, counts(400, 12), ["12 validation images are too few to choose the best round"]),
    ({}, counts(400, 12), []),  # the last round is not chosen
    (
        {},
        counts(400) | {"left_out": {"south": 40}},
        ["images of sites that sites.names does not list are left out: 40"],
    ),
])  # fmt: skip
def test_other_facts_of_study_and_images_are_said(tiny, settings, info, said):
    found = list(advice.before(tiny("fedavg", settings, local_steps=10), info))
    assert [one.startswith(words) for one, words in zip(found, said, strict=True)] == [True] * len(said)


def said_after(rounds, losses):
    watch = Watch()
    return [
        sentence
        for confusion, loss in zip(rounds, losses, strict=True)
        for sentence in watch.scored(CLASSIFICATION, [reply(one) for one in confusion], {"loss": loss})
    ]


def test_one_class_or_a_loss_that_does_not_fall_is_said_once():
    one, two = [[[9, 0], [5, 0]]], [[[9, 0], [4, 1]]]
    (said,) = said_after([one] * 6, [6.0, 5, 4, 3, 2, 1])
    assert said.startswith("the model has put every validation image into the same class in 3 rounds; raise")
    assert said_after([one, one, two, one, one], [5.0, 4, 3, 2, 1]) == []
    # sites that each have one class only, and predict it
    assert said_after([[[[9, 0], [0, 0]], [[0, 0], [0, 5]]]] * 4, [4.0, 3, 2, 1]) == []
    fine = [[[9, 1], [1, 5]]]
    (said,) = said_after([fine] * 6, [0.7, 0.7, 0.9, 0.8, 0.9, 1.0])
    assert said.startswith(
        "the validation loss has not fallen since the first round (0.7, now 0.8); lower optimizer.lr"
    )
    assert said_after([fine] * 6, [0.7, 0.71, 0.69, 0.8, 0.9, 1.0]) == []


ONE, TWO = [[9, 0], [5, 0]], [[9, 0], [4, 1]]


@pytest.mark.parametrize(("rounds", "best", "said"), [
    ([TWO, ONE], 1, True),
    ([ONE, TWO], 0, True),  # what tells classes apart may come later
    ([ONE, TWO], 1, False),
    ([ONE, ONE], 1, False),  # no round is better: the scores at the end tell
])  # fmt: skip
def test_a_chosen_round_of_one_class_is_said_where_another_tells_classes_apart(tiny, rounds, best, said):
    watch = Watch()
    for number, confusion in enumerate(rounds):
        list(watch.scored(CLASSIFICATION, [reply(confusion)], {}))
        if number == best:
            watch.choose()
        watch = Watch(watch.memory())  # a resumed run says the same
    chooses = tiny("fedavg", {"evaluation.select": "best", "evaluation.metric": "auc"})
    assert bool(watch.chosen(chooses)) == said
    assert watch.chosen(tiny("fedavg", {"evaluation.metric": "auc"})) is None  # the last round is released anyway


def test_a_run_released_by_auc_says_that_its_round_has_one_class(tiny, tmp_path, monkeypatch):
    """In the first round, which AUC likes best, all images are of one class."""
    scored = iter([True, False, False])
    monkeypatch.setattr(advice, "predicts_one_class", lambda task, replies: next(scored))
    ranks = iter([(0.9, 0.0), (0.8, 0.0), (0.7, 0.0)])
    monkeypatch.setattr(type(CLASSIFICATION), "rank", lambda *_: next(ranks))
    study = tiny("fedavg", {"evaluation.select": "best", "evaluation.metric": "auc"}, rounds=3, local_steps=1)
    assert any(one.startswith("the round that auc chose") for one in run(study, tmp_path / "run")["warnings"])


def parts(tmp_path, **info):
    return PreparedSites(tmp_path, ("north",), info)


def study_of(task, method=None, balanced=False):
    evaluation, optimizer = SimpleNamespace(final="test"), SimpleNamespace(balanced_batches=balanced)
    return SimpleNamespace(task=task, method=method or SimpleNamespace(), evaluation=evaluation, optimizer=optimizer)


def said_of(task, pooled, parts, method=None, balanced=False):
    study = study_of(task, method, balanced)
    return advice.guessing(study, pooled, advice.guessed_scores(study, parts))


def test_a_classifier_that_only_knows_the_majority_is_said(tmp_path):
    prepared = parts(tmp_path, class_counts={"north": {"test": [30, 10]}})
    said = said_of(CLASSIFICATION, {"accuracy": 0.75, "balanced_accuracy": 0.5}, prepared)
    assert "always saying the most frequent class (accuracy 0.750, and 0.750 without a look at the images)" in said
    assert said.endswith("train longer (method.rounds, method.local_epochs), or try another optimizer.lr")
    assert said_of(CLASSIFICATION, {"accuracy": 0.8, "balanced_accuracy": 0.61}, prepared) is None
    # rarer classes found at the price of some accuracy
    assert said_of(CLASSIFICATION, {"accuracy": 0.7, "balanced_accuracy": 0.7}, prepared) is None
    assert said_of(CLASSIFICATION, {"accuracy": 0.9, "balanced_accuracy": 0.9}, parts(tmp_path)) is None  # not known


@pytest.mark.parametrize("accuracy", [0.7, 0.8])
def test_a_classifier_that_misses_rarer_classes_is_said(tmp_path, accuracy):
    prepared = parts(tmp_path, class_counts={"north": {"test": [30, 10]}})
    said = said_of(CLASSIFICATION, {"accuracy": accuracy, "balanced_accuracy": 0.56}, prepared)
    assert "finds few images of some classes (balanced accuracy 0.560, and 0.500 without a look at the images" in said
    assert "set optimizer.balanced_batches = true" in said
    values = {"accuracy": accuracy, "balanced_accuracy": 0.56}
    assert "balanced_batches" not in said_of(CLASSIFICATION, values, prepared, Analytic.model_construct())
    assert "balanced_batches" not in said_of(CLASSIFICATION, values, prepared, balanced=True), "they are set"


def test_a_regression_that_only_knows_the_mean_is_said(tmp_path):
    for split, labels in (("train", [10, 20, 30]), ("validation", [20]), ("test", [10, 30])):
        folder = tmp_path / "north" / split
        folder.mkdir(parents=True)
        np.save(folder / "images.npy", np.zeros((len(labels), 1, 28, 28), np.uint8))
        np.save(folder / "labels.npy", np.array(labels, np.float32))
    said = said_of(REGRESSION, {"mae": 10.2}, parts(tmp_path))
    assert "no better than always saying the mean (mean absolute error 10.2, and 10 without" in said
    assert said_of(REGRESSION, {"mae": 5.0}, parts(tmp_path)) is None
    assert advice.guessed_scores(study_of(REGRESSION), parts(tmp_path)) == {"mae": 10.0, "rmse": 10.0}


def test_masks_that_hit_nothing_are_said(tmp_path):
    assert "(Dice 0.000)" in said_of(SEGMENTATION, {"dice": 0.0}, parts(tmp_path))
    assert said_of(SEGMENTATION, {"dice": 0.4}, parts(tmp_path)) is None


@pytest.mark.parametrize(("found", "poor"), [
    ({"psnr": 13.6, "code_usage_top": 0.02, "code_usage_bottom": 0.01}, True),
    ({"psnr": 28.0, "code_usage_top": 0.02, "code_usage_bottom": 1.0}, False),
    ({"psnr": 12.0}, True),
    ({"psnr": 25.0}, False),
    ({}, False),
])  # fmt: skip
def test_a_poor_generator_is_said(found, poor):
    assert bool(advice.poor_replay(found)) == poor


def test_synthetic_images_that_did_not_help_are_said():
    def diets(*pairs):
        sets = [{"real": {"test": {"accuracy": a}}, "augmented": {"test": {"accuracy": b}}} for a, b in pairs]
        return {f"site-{i}": table for i, table in enumerate(sets)}

    assert "at 2 of 2 sites" in advice.no_help(CLASSIFICATION, diets((0.8, 0.7), (0.8, 0.8)))
    assert advice.no_help(CLASSIFICATION, diets((0.8, 0.9), (0.8, 0.8))) is None
    assert advice.no_help(CLASSIFICATION, {"site-1": {}}) is None


def test_a_run_says_its_warnings_at_once_and_in_its_result(tiny, tmp_path, capsys):
    told = []

    class Shown(Display):
        def warned(self, sentence):
            told.append(sentence)

    # no learning at all: one class stays predicted, and the loss stays where it was
    study = tiny("fedavg", {"optimizer.lr": 1e-30, "evaluation.select": "best"}, rounds=5, local_steps=1)
    result = run(study, tmp_path / "run", display=Shown())
    assert json.loads((tmp_path / "run" / "result.json").read_text())["warnings"] == told
    begins = ("a site takes 1 step a round", "14 validation images are too few", "the validation loss has not fallen")
    assert all(any(one.startswith(begin) for one in told) for begin in begins), told
    print_result(result)
    assert capsys.readouterr().out.count("warning: ") == len(told)
