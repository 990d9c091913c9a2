"""Calibration from validation outputs, and what rounded scores of sites lie between."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from polyclinic import predict
from polyclinic.cli import run_app
from polyclinic.cli.tables import print_result
from polyclinic.errors import Notice
from polyclinic.federation.call import Reply
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.metrics.statistics import apply_temperature
from polyclinic.randomness import numpy_rng
from polyclinic.runner.evaluate.calibration import Looks, calibrate, calibrations_of, figures, looks_of
from polyclinic.runner.evaluate.case_scores import Cases, read_cases
from polyclinic.runner.evaluate.rounded_scores import extreme, rounding_intervals
from polyclinic.runner.predict.model_file import read_model_file
from polyclinic.runner.run.advice import guessed_scores
from polyclinic.runner.run.result import Result, final_metrics, take_counts
from polyclinic.tasks import TASKS, Target


def drawn(seed: int, count: int, classes: int, sharper: float) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are `sharper` times as sure as they should be, and labels drawn from the true probabilities."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1.5, (count, classes))
    truth = apply_temperature(logits, 1.0)
    labels = (truth.cumsum(1) < rng.random((count, 1))).sum(1)
    return logits * sharper, labels


def test_what_is_fitted_on_few_or_broken_or_too_sure_outputs():
    found = calibrate("classification", *drawn(0, 4000, 2, 3.0), None)
    assert found.temperature == pytest.approx(3.0, rel=0.2)  # measured: 2.9; standard error 2 %
    found = calibrate("classification", *drawn(6, 12, 2, 1.0), None)
    assert "0.95" not in found.quantiles  # 19 cases are the fewest
    assert calibrate("classification", *drawn(6, 5, 2, 1.0), None) is None
    logits, labels = drawn(7, 50, 2, 1.0)
    logits[3] = np.nan
    assert calibrate("classification", logits, labels, None) is None
    assert calibrate("segmentation", logits, labels, None) is None


@pytest.mark.parametrize("classes", [2, 4])
def test_sets_hold_the_truth_as_often_as_they_say(classes):
    found = calibrate("classification", *drawn(1, 3000, classes, 3.0), None)
    logits, labels = drawn(2, 3000, classes, 3.0)
    sets = found.sets(apply_temperature(logits, found.temperature), 0.9)
    assert 0.87 < sets[np.arange(3000), labels].mean() <= 1


def test_thresholds_are_of_calibrated_probabilities():
    logits, labels = drawn(3, 4000, 2, 3.0)
    found = calibrate("classification", logits, labels, None)
    ill = apply_temperature(logits, found.temperature)[:, 1]
    healthy = labels == 0
    for share, cut in found.thresholds.items():
        assert (ill[healthy] <= cut).mean() == pytest.approx(float(share), abs=0.005)
    # the same cut on scores that were not calibrated calls more than twice as many healthy people ill
    assert (apply_temperature(logits, 1.0)[healthy, 1] > found.thresholds["0.9"]).mean() > 0.14


def test_intervals_of_a_regression_reach_as_far_as_its_errors():
    rng = np.random.default_rng(4)
    labels = rng.uniform(0, 200, 2000)
    found = calibrate("regression", labels + rng.uniform(-20, 20, 2000), labels, None)
    assert found.temperature is None
    assert found.reach(0.9) == pytest.approx(18, abs=1)  # errors are uniform up to 20
    assert found.sets(np.array([[0.5, 0.5]]), 0.9) is None


def test_rounding_keeps_the_promise():
    """Kept numbers are rounded up, so that the case at the quantile stays inside."""
    for seed in range(20):
        logits, labels = drawn(seed, 40, 3, 2.0)
        found = calibrate("classification", logits, labels, None)
        sets = found.sets(apply_temperature(logits, found.temperature), 0.9)
        assert sets[np.arange(40), labels].sum() >= 37  # 0.9 * 41, rounded up


def test_a_run_keeps_its_calibration_in_card_and_result(tiny, undisturbed, tmp_path):
    done = undisturbed(tiny("fedavg"))
    card, _ = read_model_file(done.folder / "model.safetensors")
    cases = read_cases(done.folder, "validation")
    assert cases is not None
    assert cases.outputs is not None
    assert card.calibrations == {"": calibrate("classification", cases.outputs, cases.labels, None)}
    assert done["calibrations"] == {"": card.calibrations[""].model_dump(mode="json")}
    assert card.calibrations[""].cases == len(cases)


def test_patients_of_different_sites_with_the_same_number_are_different():
    logits, labels = drawn(8, 40, 2, 1.0)
    sites, numbers = np.arange(40) // 20, np.arange(40) % 10
    cases = Cases(
        "classification",
        np.array(["a", "b"]),
        sites,
        labels,
        numbers,
        logits,
        predictions=apply_temperature(logits, 1.0),
    )
    found = calibrations_of(cases, ["", "a"])
    assert (found[""].cases, found["a"].cases) == (20, 10)
    assert calibrations_of(None, [""]) == {}


GREY = Looks(images=10, brightness=(90, 110), contrast=(40, 60), colour=(0, 0))


def test_figures_and_ranges_by_hand():
    image = np.array([[[0, 100]], [[0, 40]], [[60, 100]]], np.uint8)  # two pixels: 0 0 60, and 100 40 100
    assert figures(image) == pytest.approx(
        {"brightness": 50.0, "contrast": np.std([0, 100, 0, 40, 60, 100]), "colour": 60}
    )
    sets = [np.full((6, 1, 4, 4), 20, np.uint8), np.zeros((0, 1, 4, 4), np.uint8), np.full((5, 1, 4, 4), 33, np.uint8)]
    sets[0][0, 0, 0, 0] = 29  # a mean of 20.56
    looks = looks_of(sets)
    assert (looks.images, looks.brightness, looks.contrast, looks.colour) == (11, (20, 33), (0, 3), (0, 0))
    assert looks_of(sets[:1]) is None, "six images say little"


def grey(mean, spread):
    """A grey image with this mean and standard deviation."""
    half = np.full(32, spread)
    return (mean + np.concatenate([half, -half])).astype(np.uint8).reshape(8, 8)


@pytest.mark.parametrize(("pixels", "words"), [
    (grey(100, 50), ""),
    (grey(73, 50), ""),  # within half of the width and eight levels
    (grey(71, 50), "brightness 71, and 90 to 110 there"),
    (grey(100, 21), "contrast 21, and 40 to 60 there"),
    (np.stack([grey(100, 50)] * 3, -1), ""),
    (np.stack([grey(100, 50), grey(100, 50), grey(91, 50)], -1), "colour 9, and 0 to 0 there"),
])  # fmt: skip
def test_what_is_outside_is_said(pixels, words):
    """Colour is that of the file: preparation takes it away."""
    image = (pixels if pixels.ndim == 2 else pixels[..., 0])[None]
    assert GREY.unlike(image, pixels) == words


def test_predict_says_that_images_are_of_another_kind(tiny, undisturbed, tmp_path, capsys):
    """A model of colour fundus images, its own kind and a grey picture of noise."""
    model = undisturbed(tiny("fedavg")).folder
    looks = read_model_file(model / "model.safetensors")[0].looks
    assert looks.colour[0] > 20
    noise = numpy_rng("noise").integers(0, 256, (28, 28)).astype(np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    assert run_app(["predict", str(model), str(tmp_path / "noise.png")]) == 0
    assert "1 of 1 images do not look like those of the study, such as noise.png (" in capsys.readouterr().err
    with pytest.warns(Notice, match="do not look like those of the study"):
        [found] = predict(model, [tmp_path / "noise.png"])
    assert "brightness 12" in found.unlike


CLASSES = {2: Target(("healthy", "ill")), 3: Target(("a", "b", "c"))}
MONTHS = Target((), "months", (0.0, 240.0))


def test_the_largest_and_smallest_weighted_mean_by_hand():
    values, low, high = np.array([0.0, 1.0]), np.array([1.0, 1.0]), np.array([3.0, 2.0])
    assert extreme(values, low, high, 1) == 2 / 3
    assert extreme(values, low, high, -1) == 1 / 4


@pytest.mark.parametrize("least", [3, 5, 10])
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("seed", range(6))
def test_exact_scores_of_classes_lie_within(seed, classes, least):
    """Three sites of 20 to 80 images, from a model that is little or much better than a guess."""
    rng, task, target = np.random.default_rng((seed, classes, least)), TASKS["classification"](), CLASSES[classes]
    exact, told = {}, {}
    for site in ("north", "east", "south"):
        labels = torch.from_numpy(rng.choice(classes, rng.integers(20, 80), p=rng.dirichlet(np.full(classes, 3.0))))
        logits = rng.normal(0, 1.0, (len(labels), classes))
        logits[np.arange(len(labels)), labels] += rng.uniform(0.2, 3)
        exact[site] = task.sums(torch.from_numpy(logits * rng.uniform(0.2, 4)), labels, None, target)
        told[site] = task.coarse(exact[site], least, target)
    found = rounding_intervals(task, target, told)
    sites = [site for site, sums in told.items() if int(sums["count"])]
    assert list(found["per_site"]) == sites
    for site in sites:
        holds(task, exact[site], found["per_site"][site])
    holds(task, added(task, [exact[site] for site in sites]), found["pooled"])
    pooled = found["pooled"]["accuracy"]
    assert pooled["high"] - pooled["low"] < 0.75


def holds(task, exact, intervals):
    assert {"accuracy", "balanced_accuracy"} <= set(intervals) <= {"accuracy", "balanced_accuracy", "auc"}
    for name, value in task.finish(exact).items():
        if name in intervals:
            assert intervals[name]["low"] - 1e-9 <= value <= intervals[name]["high"] + 1e-9, name


def added(task, sums):
    total = sums[0]
    for one in sums[1:]:
        total = task.add(total, one)
    return total


@pytest.mark.parametrize("least", [5, 10])
@pytest.mark.parametrize("seed", range(4))
def test_exact_errors_of_values_lie_within(seed, least):
    rng, task = np.random.default_rng((seed, least)), TASKS["regression"]()
    exact, told = {}, {}
    for site in ("north", "east", "south"):
        labels = torch.from_numpy(rng.uniform(0, 240, rng.integers(20, 90)))
        said = task.bounded(
            (labels[:, None] - 120) / 120 + torch.from_numpy(rng.normal(0, 0.2, (len(labels), 1))), MONTHS
        )
        exact[site] = task.sums(said, labels, None, MONTHS)
        told[site] = task.coarse(exact[site], least, MONTHS)
    found = rounding_intervals(task, MONTHS, told)
    for place, sums in {**exact, "": added(task, list(exact.values()))}.items():
        intervals = found["per_site"][place] if place else found["pooled"]
        for name in ("mae", "rmse"):
            assert intervals[name]["low"] <= task.finish(sums)[name] <= intervals[name]["high"], (place, name)


def test_bounds_of_rounded_means_by_hand():
    """Counts told as 60 and 240 were 30 to 75 and 120 to 300 images. Steps of a mean of values up to 240 are, with
    30 images and 120, at most 10 and 2: mean errors of 15 to 25 and of 49 to 51."""
    sums = {
        site: {"count": torch.tensor(count), **dict.fromkeys(("absolute_error", "squared_error", "loss"), total)}
        for site, count, total in (("north", 60, torch.tensor(60 * 20.0)), ("east", 240, torch.tensor(240 * 50.0)))
    }
    found = rounding_intervals(TASKS["regression"](), MONTHS, sums)
    assert found["per_site"]["north"]["mae"] == pytest.approx({"low": 15, "high": 25})
    assert found["per_site"]["east"]["mae"] == pytest.approx({"low": 49, "high": 51})
    low, high = (75 * 15 + 120 * 49) / 195, (30 * 25 + 300 * 51) / 330
    assert found["pooled"]["mae"] == pytest.approx({"low": low, "high": high})


def test_sites_that_tell_nothing_have_no_interval():
    task, target = TASKS["classification"](), CLASSES[2]
    sums = task.coarse(task.sums(torch.randn(3, 2), torch.tensor([0, 1, 1]), None, target), 10, target)
    assert rounding_intervals(task, target, {"north": sums}) == {}
    exact = task.sums(torch.randn(60, 2), torch.arange(60) % 2, None, target)  # of a policy with fine scores
    assert rounding_intervals(task, target, {"north": exact}) == {}


def test_a_table_of_rounded_scores_shows_what_they_lie_between(capsys, tmp_path):
    spans = {"accuracy": {"low": 0.789, "high": 1.0}}
    rounding = {"split": "test", "pooled": spans, "mean": spans, "per_site": {"north": spans, "east": {}}}
    told = {"accuracy": 1.0, "auc": 0.6}
    metrics = {"test": told, "mean": told, "per_site": {"north": told, "east": told}, "rounding": rounding}
    values = {
        **{"metrics": metrics, "method": "fedavg", "privacy": None, "data": {}},
        **{"communication": {"total_bytes": 1}, "selected": {"round": 1, "by": "last"}},
    }
    print_result(Result(tmp_path, values))
    said = capsys.readouterr().out
    assert said.count("0.79 to 1.00") == 3
    assert "1.000" not in said
    assert "0.600" not in said
    assert "scores leave the sites in coarse steps" in said


def test_a_deployed_table_holds_the_simulated_one_within_what_it_says(tiny):
    """The same model on the same images, scored at simulated sites and at deployed ones."""
    task, target, rng = TASKS["classification"](), CLASSES[2], np.random.default_rng(3)
    sums = {}
    for site in ("north", "east", "south"):
        labels = torch.from_numpy(rng.choice(2, 60))
        sums[site] = task.sums(torch.from_numpy(rng.normal(0, 1, (60, 2))), labels, None, target)

    def result(simulation, exact=False):
        told = sums if simulation or exact else {site: task.coarse(one, 10, target) for site, one in sums.items()}
        replies = [Reply(site, (Parcel("metrics", one),)) for site, one in told.items()]
        engine, trainer = SimpleNamespace(simulation=simulation), SimpleNamespace(target=target)
        asked = {"ask_scores": lambda *_, **__: replies, "adds_scores": False}
        federation = SimpleNamespace(engine=engine, trainer=trainer, **asked)
        return final_metrics(federation, SimpleNamespace(study=tiny("fedavg")), {"": {}}, False)

    exact, deployed = result(True), result(False)
    assert "rounding" not in exact
    for part, values in {"pooled": exact["test"], "mean": exact["mean"]}.items():
        for name, bounds in deployed["rounding"][part].items():
            assert bounds["low"] <= values[name] <= bounds["high"], (part, name)
    assert deployed["rounding"]["per_site"].keys() == exact["per_site"].keys()
    told, info = result(False, exact=True), {"counts": {}, "class_counts": {}}  # policies that let exact scores out
    take_counts(told, info, "test")
    assert told == exact
    assert {site: own["test"] for site, own in info["counts"].items()} == dict.fromkeys(sums, 60)
    guessed = guessed_scores(tiny("fedavg"), SimpleNamespace(info=info))
    labels = sum(one["confusion"].sum(1) for one in sums.values())
    assert guessed == {"accuracy": float(labels.max()) / 180, "balanced_accuracy": 0.5}
