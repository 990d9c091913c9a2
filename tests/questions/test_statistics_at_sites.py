"""Statistics that a site computes from its own cases: those of a simulation, made coarse, and nothing of a case."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.data.parts import ImageSet
from polyclinic.federation.call import GateRefused, Reply
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.metrics.roc import auc
from polyclinic.metrics.statistics.significance import delong_interval, delong_test
from polyclinic.questions.evaluate import EvaluateOnly
from polyclinic.questions.statistics import SafeStatistics, changes_between, check_told, joined, tell_once, told_about
from polyclinic.tasks.classification import Classification
from polyclinic.tasks.regression import Regression
from polyclinic.tasks.segmentation import Segmentation

CASES = 240


class Trainer:
    """A model whose outputs are written down: `weights["outputs"]` [N, C]."""

    def __init__(self, task, target):
        self.task, self.target = task, target

    def load(self, weights):
        self.said = weights["outputs"]

    def outputs(self, part):
        rows = torch.from_numpy(np.asarray(part.images)[:, 0, 0, 0].astype(np.int64))
        masks = None if part.masks is None else torch.from_numpy(part.masks)[:, None].float()
        yield self.said[rows], masks


def part_of(labels, **more):
    """Images that hold nothing but their own number."""
    images = np.arange(len(labels), dtype=np.uint8)[:, None, None, None]
    return ImageSet(images, labels, **more)


def site_of(task, target, part, least=10, columns=(), folder=None, secret=""):
    data = SimpleNamespace(test=part, column_names=columns)
    return SimpleNamespace(
        name="north", data=data, trainer=Trainer(task, target), min_cohort=least, folder=folder, secret=secret, round=3
    )


@pytest.fixture(scope="module")
def scores():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, CASES)
    good = 1.6 * labels + rng.standard_normal(CASES)
    fair = 0.6 * labels + rng.standard_normal(CASES)
    return labels, *(torch.from_numpy(np.stack([-s / 2, s / 2], 1)) for s in (good, fair))


def binary(labels, least=10, **more):
    target = SimpleNamespace(classes=("clear", "ill"), label_range=None)
    columns = more.pop("names", ())
    return site_of(Classification(), target, part_of(labels, **more), least, columns)


@pytest.mark.parametrize("least", [0, 10])
def test_auc_and_delong_are_those_of_the_cases_up_to_rounding(scores, least):
    labels, good, _ = scores
    site = binary(labels, least)
    told = told_about(site, site.data.test, {"outputs": good})
    ranks = good.numpy()[:, 1] - good.numpy()[:, 0]
    exact = auc(ranks[labels == 1], ranks[labels == 0])
    by_delong = delong_interval(ranks, labels)
    step = 0.01 if least else 1e-9  # one of the more than 100 patients of a class
    assert float(told["auc"][0]) == pytest.approx(exact, abs=step)
    value, low, high, _ = told["auc by DeLong"].tolist()
    assert value == pytest.approx(exact, abs=step)
    assert low <= by_delong.low + 1e-9
    assert high >= by_delong.high - 1e-9
    assert high - low <= by_delong.high - by_delong.low + 2 * step + 1e-9
    check_told(told, 2)


def test_a_change_is_tested_in_pairs(scores):
    labels, good, fair = scores
    site = binary(labels, 0)
    told = changes_between(site, site.data.test, {"outputs": good}, {"outputs": fair})
    ranks = [said.numpy()[:, 1] - said.numpy()[:, 0] for said in (good, fair)]
    test = delong_test(*ranks, labels)
    value, low, high, _ = told["change of auc by DeLong"].tolist()
    assert (value, low, high) == pytest.approx((test.difference, test.low, test.high))
    found = joined([Reply("north", (Parcel("statistics", told),))], ("clear", "ill"))
    assert found["p_of_change"]["change of auc by DeLong"] == pytest.approx(test.p, rel=1e-3, abs=1e-12)
    boot = told["change of auc"].tolist()
    assert boot[0] == pytest.approx(test.difference)
    assert boot[1:3] == pytest.approx([low, high], abs=0.03)
    same = changes_between(site, site.data.test, {"outputs": good}, {"outputs": good})
    assert same["change of auc"].tolist()[:3] == [0, 0, 0]


@pytest.mark.parametrize("patients", [CASES, 60])
def test_two_models_that_differ_on_one_patient_are_told_like_two_that_do_not(scores, patients):
    """Else a model that says something else of one image would ask whether the image is there."""
    labels, good, _ = scores
    site = binary(labels[:patients], 10)
    part = part_of(labels[:patients])
    same = changes_between(site, part, {"outputs": good}, {"outputs": good})
    for number in range(0, patients, 7):
        turned = good.clone()
        turned[number] = -20 * good[number].sign()
        told = changes_between(site, part, {"outputs": turned}, {"outputs": good})
        for name in ("change of accuracy", "change of brier", "change of auc", "change of balanced_accuracy"):
            assert told[name].tolist() == pytest.approx(same[name].tolist(), abs=1e-9), (name, number)


def test_a_deployed_site_compares_two_models_that_the_study_names(scores, tmp_path):
    labels, good, fair = scores
    site = binary(labels)
    site.secret, site.folder, site.data.test = "secret", tmp_path, part_of(labels)
    digest = Parcel("weights", {"outputs": fair}).digest
    asked = EvaluateOnly(against="fair.safetensors", against_digest=digest)
    for second in (None, {"outputs": good}):
        with pytest.raises(ParcelRejected, match="the second model that came is not the one"):
            asked.give_intervals(site, {"outputs": good}, against=second)
    with pytest.raises(ParcelRejected, match="the second model that came is not the one"):
        EvaluateOnly().give_intervals(site, {"outputs": good}, against={"outputs": fair})
    told = asked.give_intervals(site, {"outputs": good}, against={"outputs": fair})
    check_told(told.tensors, 2)
    value, low, high, _ = told.tensors["change of auc by DeLong"].tolist()
    assert 0 < low < value < high
    found = joined([Reply("north", (told,))], ("clear", "ill"))
    assert found["p_of_change"]["change of auc by DeLong"] < 0.01


def test_the_mean_of_sites_is_told_with_what_is_missing(scores):
    labels, good, _ = scores
    told = told_about(binary(labels), part_of(labels), {"outputs": good})
    few = part_of(np.zeros(CASES, np.int64))
    one_class = told_about(binary(few.labels), few, {"outputs": good})
    replies = [Reply(name, (Parcel("statistics", one),)) for name, one in (("north", told), ("south", one_class))]
    found = joined(replies, ("clear", "ill"))
    assert found["notes"] == ["site 'south' has no test image of ill, or too few"]
    assert "auc" not in found["per_site"]["south"]
    both = [found["per_site"][site]["accuracy"] for site in ("north", "south")]
    assert found["mean"]["accuracy"][0] == pytest.approx((both[0][0] + both[1][0]) / 2)
    assert found["mean"]["accuracy"][3] == pytest.approx((both[0][3] + both[1][3]) / 4)


def test_sub_groups_of_few_patients_are_told_by_simulated_sites_only(scores):
    labels, good, _ = scores
    sexes = np.array((["f"] * 100 + ["m"] * 80 + ["x"] * 60)[:CASES])
    few = np.array(["old"] * 150 + ["young"] * 85 + ["new"] * 5)
    single = np.array(["old"] * 150 + ["young"] * 88 + ["new", "rare"])
    names = ("sex", "scanner", "ward")
    site = binary(labels, 10, columns=np.stack([sexes, few, single], 1), names=names)
    told = told_about(site, site.data.test, {"outputs": good}, [*names, "unknown"])
    groups = {name.split(":")[0] for name in told if " = " in name}
    # 'young' would give 'new' away, and the two of 'new' and 'rare'
    assert groups == {"sex = f", "sex = m", "sex = x", "scanner = old", "ward = old"}
    labels, good, _ = scores
    groups = np.array(["many"] * (CASES - 19) + ["ten"] * 10 + ["nine"] * 9)
    site = binary(labels, 0, columns=groups[:, None], names=("group",))
    told = told_about(site, site.data.test, {"outputs": good}, ["group"])
    assert {name.split(":")[0] for name in told if " = " in name} == {"group = many", "group = ten"}


def test_values_and_masks_have_intervals_too():
    rng = np.random.default_rng(1)
    ages = rng.uniform(0, 100, CASES)
    site = site_of(
        Regression(),
        SimpleNamespace(classes=(), label_range=(0.0, 100.0), unit="", centre=0.0, scale=1.0),
        part_of(ages),
    )
    site.trainer.task = SimpleNamespace(
        dense=False, like="regression", predictions=lambda said, _: said[:, 0], bounded=lambda said, _: said
    )
    told = told_about(site, site.data.test, {"outputs": torch.from_numpy(ages + 3)[:, None]})
    assert float(told["mae"][0]) == pytest.approx(3, abs=0.5)
    masks = rng.integers(0, 2, (40, 4, 4)).astype(np.uint8)
    drawn = site_of(Segmentation(), SimpleNamespace(classes=()), part_of(np.zeros(40, np.int64), masks=masks))
    drawn.trainer.task = SimpleNamespace(
        dense=True, like="segmentation", predictions=lambda said, _: said[:, 0].sigmoid()
    )
    right = {"outputs": torch.from_numpy(masks)[:, None].double() * 20 - 10}
    assert told_about(drawn, drawn.data.test, right)["dice"].tolist()[:3] == [1, 1, 1]


def test_few_patients_or_one_class_of_few_tell_no_figure(scores):
    labels, good, fair = scores
    part = part_of(labels, cases=np.arange(CASES) % 9)
    site = binary(labels, 10)
    told = told_about(site, part, {"outputs": good}) | changes_between(site, part, {"outputs": good}, {"outputs": fair})
    assert set(told) == {"bins", "right", "classes told"}
    _, good, _ = scores
    labels = np.zeros(CASES, dtype=np.int64)
    labels[:4] = 1
    told = told_about(binary(labels), part_of(labels), {"outputs": good})
    assert "accuracy" in told
    assert not {"auc", "balanced_accuracy", "auc by DeLong"} & set(told)


def test_a_deployed_site_tells_one_model_of_a_run_after_its_last_round(scores, tmp_path):
    labels, good, fair = scores
    site = binary(labels)
    site.secret, site.folder, site.state, site.data.test = "secret", tmp_path, None, part_of(labels)
    asked = SafeStatistics(lambda _: None, rounds=3, ends_early=False)
    site.round = 2
    with pytest.raises(ParcelRejected, match="after the last round"):
        asked.give_statistics(site, {"outputs": good})
    site.round = 3
    first = asked.give_statistics(site, {"outputs": good})
    assert asked.give_statistics(site, {"outputs": good}).digest == first.digest  # such as after an interruption
    with pytest.raises(GateRefused, match="statistics of another model were told"):
        asked.give_statistics(site, {"outputs": fair})


def test_the_same_model_asked_in_another_way_is_another_question(scores, tmp_path):
    labels, good, _ = scores
    site = binary(labels)
    site.secret, site.folder = "secret", tmp_path
    tell_once(site, {"outputs": good}, "none")
    with pytest.raises(GateRefused, match="statistics of another model were told"):
        tell_once(site, {"outputs": good}, "best")


def test_sub_groups_that_the_study_does_not_have_are_refused(scores, tmp_path):
    labels, good, fair = scores
    site = binary(labels)
    site.secret, site.folder = "secret", tmp_path
    with pytest.raises(ParcelRejected, match=r"by \['sex'\] are asked for"):
        EvaluateOnly().give_intervals(site, {"outputs": good}, by=["sex"])
    EvaluateOnly().give_intervals(site, {"outputs": good})
    with pytest.raises(GateRefused, match="statistics of another model were told"):
        EvaluateOnly().give_intervals(site, {"outputs": fair})


def test_wild_models_tell_no_image_and_errors_may_lie_above():
    """One image in a hundred gets a number far outside the labels: the mean error stays that of labels."""
    target = SimpleNamespace(classes=(), label_range=(0.0, 100.0))
    part = part_of(np.full(100, 50.0))
    outputs = torch.zeros(100, 1, dtype=torch.float64)
    outputs[7] = 1e9
    told = told_about(site_of(Regression(), target, part), part, {"outputs": outputs})
    assert float(told["mae"][0]) <= 1
    assert float(told["rmse"][0]) % 10 == 0  # one patient may change it by a tenth of the range
    # Gaps have no sign, so chance widens them; a simulated site does not round the ends outwards.
    check_told({"calibration_error": torch.tensor([0.01, 0.02, 0.04, 0.00003], dtype=torch.float64)}, 2)


@pytest.mark.parametrize("lie", [
    {"auc": torch.ones(5)},
    {"auc": torch.full((4,), float("nan"))},
    {"bins": torch.ones(5)},
    {"x" * 500: torch.ones(4)},
], ids=["long", "nan", "floats", "name"])  # fmt: skip
def test_what_is_no_interval_is_refused(lie):
    with pytest.raises(ParcelRejected, match="is no interval and no histogram"):
        check_told({name: tensor.double() for name, tensor in lie.items()}, 2)


def test_a_deployed_site_without_test_images_has_nothing_to_tell(scores, tmp_path):
    labels, good, _ = scores
    site = binary(labels)
    site.secret, site.folder, site.round, site.data.test = "secret", tmp_path, 1, part_of(labels[:0])
    asked = SafeStatistics(lambda _: None, rounds=3, ends_early=True)
    assert asked.give_statistics(site, {"outputs": good}).tensors == {}


@pytest.mark.parametrize("lie", [
    {"auc": [0.5, 0.4, 0.6, -1.0]},
    {"auc": [0.5, 0.4, 0.6, 1.0]},
    {"auc": [1e308] * 4},
    {"change of mae": [1e308, -1e308, 1e308, 1e308]},
    {"auc": [0.7, 0.4, 0.6, 0.01]},
    {"calibration_error": [0.5, 0.6, 0.4, 0.0]},
    {"bins": [5, 5, 5, 5, -1], "right": [1, 1, 1, 1, -2]},
    {"bins": [2**62] * 5, "right": [1] * 5},
    {"bins": [5] * 5, "right": [6] * 5},
    {"right": [6] * 5},
    {"classes told": [1, 2**62]},
    # just beyond the limits of the next test
    {"auc": [1.001, 0.9, 1.0, 0.0]},
    {"auc": [0.899, 0.9, 1.0, 0.0]},
    {"auc": [0.5, 0.4, 0.6, 0.041]},
    {"auc": [0.5, -21.0, 0.6, 0.0]},
    {"auc": [0.5, 0.4, 21.0, 0.0]},
    {"calibration_error": [21.0, 0.4, 0.6, 0.0]},
    {"mae": [0.0, 0.0, 1.1e9, 0.0]},
], ids=str)  # fmt: skip
def test_numbers_that_no_cases_have_are_refused(lie):
    with pytest.raises(ParcelRejected, match=r"statistics: '.*' (is no interval|has numbers that no images have)"):
        check_told({name: torch.tensor(numbers, dtype=kind_of(numbers)) for name, numbers in lie.items()}, 2)


def kind_of(numbers):
    return torch.int64 if isinstance(numbers[0], int) else torch.float64


@pytest.mark.parametrize("told", [
    {"auc": [1.0, 1.0, 1.0, 0.0]},
    {"auc": [0.4, 0.4, 0.6, 0.04]},
    {"auc": [20.0, -20.0, 20.0, 0.0]},
    {"mae": [1e9, 0.0, 1e9, 1.0]},
], ids=str)  # fmt: skip
def test_intervals_at_their_limits_pass(told):
    """A value may be an end of its interval, and a variance its width squared."""
    check_told({name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in told.items()}, 2)


def test_statistics_are_told_when_the_run_is_over(scores, tmp_path, monkeypatch):
    labels, good, _ = scores
    site = binary(labels)
    site.folder, site.state, site.data.test = tmp_path, None, part_of(labels)
    scored = []
    monkeypatch.setattr("polyclinic.questions.statistics.was_scored", lambda own: bool(scored))
    early = SafeStatistics(lambda _: None, rounds=5, ends_early=True)
    assert early.give_statistics(site, {"outputs": good}).tensors, "a simulated site tells at any time"
    site.secret = "secret"
    with pytest.raises(ParcelRejected, match="after its test scores"):
        early.give_statistics(site, {"outputs": good})
    scored.append(True)
    assert early.give_statistics(site, {"outputs": good}).tensors


def test_a_change_is_told_where_the_first_model_is_another_one(scores):
    labels, good, fair = scores
    site = binary(labels, 0)
    site.state, site.data.test = None, part_of(labels)

    def told(first):
        asked = SafeStatistics(lambda name: first, rounds=1, ends_early=False)
        return {name for name in asked.give_statistics(site, {"outputs": good}).tensors if name.startswith("change")}

    assert "change of auc" in told({"outputs": fair})
    assert told(None) == told({"outputs": good.clone()}) == told({"other": fair}) == set()
