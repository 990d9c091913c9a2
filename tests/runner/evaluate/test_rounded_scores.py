"""Coarse scores of deployed sites lie, with the exact ones, inside the intervals that are told beside them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.cli.tables import print_result
from polyclinic.federation.call import Reply
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.runner.evaluate.rounded_scores import extreme, rounding_intervals
from polyclinic.runner.run.advice import guessed_scores
from polyclinic.runner.run.result import Result, final_metrics, take_counts
from polyclinic.tasks import TASKS, Target

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
    assert "the sites' policies round scores" in said


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
        federation = SimpleNamespace(engine=engine, trainer=trainer, ask_all=lambda *_, **__: replies)
        return final_metrics(federation, tiny("fedavg"), {"": {}}, False)

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
