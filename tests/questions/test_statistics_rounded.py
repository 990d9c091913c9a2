"""Statistics that leave a site, by hand: how coarse they are, from how many patients on, and what is believed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_statistics_at_sites import binary, part_of, site_of

from polyclinic.errors import BadInput
from polyclinic.federation.call import Reply
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.files import write_tensors
from polyclinic.metrics.statistics.significance import delong_test
from polyclinic.questions.evaluate import EvaluateOnly, second_model
from polyclinic.questions.statistics import _p, changes_between, check_told, joined, score, told_about
from polyclinic.tasks.regression import Regression
from polyclinic.tasks.task import MOST_IMAGES

#: 100 patients of each class, one image each
EVEN = np.arange(200) % 2


def said(labels, strength=1.0, seed=0):
    noise = np.random.default_rng(seed).standard_normal(len(labels))
    margin = strength * np.asarray(labels) + noise
    return {"outputs": torch.from_numpy(np.stack([-margin / 2, margin / 2], 1))}


def whole_steps(numbers, step):
    return all(abs(number / step - round(number / step)) < 1e-6 for number in numbers)


def test_two_models_differ_by_no_less_than_one_patient_can_change():
    """One of 200 patients changes a mean by 0.005 and a figure of classes by 0.01, in each of two models."""
    site = binary(EVEN)
    told = changes_between(site, site.data.test, said(EVEN), said(EVEN))
    steps = {"accuracy": 0.01, "brier": 0.01, "auc": 0.02, "balanced_accuracy": 0.02, "calibration_error": 0.02}
    for name, step in steps.items():
        assert told[f"change of {name}"].tolist()[:3] == pytest.approx([0, -2 * step, 2 * step]), name
    assert "change of loss" not in told
    site = binary(EVEN)
    one, other = said(EVEN, 2.0), said(EVEN, 0.5, seed=1)
    value, low, high, _ = changes_between(site, site.data.test, one, other)["change of auc by DeLong"].tolist()
    ranks = [(model["outputs"][:, 1] - model["outputs"][:, 0]).numpy() for model in (one, other)]
    exact = delong_test(*ranks, EVEN)
    assert whole_steps((value, low, high), 0.02)
    assert value == pytest.approx(exact.difference, abs=0.01)
    assert exact.low - 0.02 < low <= exact.low
    assert exact.high <= high < exact.high + 0.02
    # The Dice of one of 40 patients changes the mean by 0.025, in each of two models; the rounded step is 0.05.
    site = segmentation(np.ones((40, 2, 2), np.uint8))
    right = {"outputs": torch.full((40, 1, 2, 2), 9.0).double()}
    told = changes_between(site, site.data.test, right, right)
    assert told["change of dice"].tolist()[:3] == pytest.approx([0, -0.1, 0.1])


@pytest.mark.parametrize(("label_range", "most"), [((0.0, 50.0), 50.0), (None, 30.0)])
def test_one_patient_changes_errors_by_the_range_of_the_labels(label_range, most):
    """Four patients, the first with two of five images."""
    labels = np.array([10.0, 40.0, 20.0, 30.0, 15.0])
    part = part_of(labels, cases=np.array([0, 0, 1, 2, 3]))
    site = site_of(Regression(), SimpleNamespace(classes=(), label_range=label_range), part, least=0)
    task = SimpleNamespace(dense=False, like="regression", predictions=lambda said, _: said[:, 0])
    site.trainer.task = task
    bounds = score(site, part, {"outputs": torch.from_numpy(labels)[:, None]}).bounds
    share = most * 2 / 5 * 4
    assert bounds == pytest.approx({"mae": share, "bias": share, "rmse": share * 5**0.5})


@pytest.mark.parametrize(
    ("patients", "least", "told"), [(8, 0, False), (10, 0, True), (22, 12, False), (24, 12, True), (18, 20, False)]
)
def test_delongs_figures_need_ten_patients_and_enough_of_each_class(patients, least, told):
    labels = np.arange(patients) % 2
    site = binary(labels, least)
    one = told_about(site, site.data.test, said(labels))
    two = changes_between(site, site.data.test, said(labels, 3.0), said(labels, seed=1))
    assert ("auc by DeLong" in one) is ("change of auc by DeLong" in two) is told


def test_several_images_of_one_patient_count_as_one():
    labels = np.arange(18) % 2
    site = binary(labels, 9)
    assert "auc by DeLong" in told_about(site, site.data.test, said(labels))
    few = part_of(labels, cases=np.arange(18) // 2)  # nine patients, each with an image of both classes
    assert "auc by DeLong" not in told_about(site, few, said(labels))
    assert "change of auc by DeLong" not in changes_between(site, few, said(labels), said(labels, seed=1))
    masks = np.array([[[1, 1]], [[0, 0]], [[1, 0]]], np.uint8)
    site = segmentation(masks, cases=np.array([7, 3, 7]))
    # probabilities: one half is no mask. Patient 7: 1 of 2 and 1 of 1 pixel, 1 too many. Patient 3: one too many
    outputs = torch.tensor([[[[0.9, 0.5]]], [[[0.6, 0.2]]], [[[0.51, 0.7]]]]).double()
    found = score(site, site.data.test, {"outputs": outputs}).metrics
    of_patient_7, of_patient_3 = 2 * 2 / (3 + 3), 0.0
    everyone, only_7 = np.ones((1, 3)), np.array([[1.0, 0.0, 1.0]])
    assert float(found(everyone)["dice"][0]) == pytest.approx((of_patient_7 + of_patient_3) / 2, abs=1e-3)
    assert float(found(only_7)["dice"][0]) == pytest.approx(of_patient_7, abs=1e-3)


@pytest.mark.parametrize(("least", "known"), [(0, [1, 1, 0]), (3, [1, 0, 0]), (2, [1, 1, 0])])
def test_a_class_is_told_of_from_the_fewest_patients_on(least, known):
    """Fourteen patients of the first class, two of the second with three images each, none of the third."""
    labels = np.array([0] * 14 + [1] * 6)
    part = part_of(labels, cases=np.array([*range(14), 20, 20, 20, 21, 21, 21]))
    site = binary(labels, least)
    site.trainer.target.classes = ("a", "b", "c")
    outputs = torch.from_numpy(np.random.default_rng(3).standard_normal((20, 3)))
    assert told_about(site, part, {"outputs": outputs})["classes told"].tolist() == known


def test_names_histograms_and_p_values_by_hand():
    scanners = np.array(["s" * 200] * 200)
    site = binary(EVEN, columns=scanners[:, None], names=("scanner",))
    told = told_about(site, site.data.test, said(EVEN), ["scanner"])
    assert f"scanner = {'s' * 110}accuracy" in told, "120 letters, and the name of a metric"
    check_told(whole({"bins": [MOST_IMAGES] * 5, "right": [0, 1, 2, 3, MOST_IMAGES]}), 2)
    for lie in ({"bins": [MOST_IMAGES + 1] * 5}, {"right": [-1, 0, 0, 0, 0]}, {"right": [5, 0, 0, 0, 0]}):
        with pytest.raises(ParcelRejected, match="has numbers that no images have"):
            check_told(whole({**BINS, **lie}), 2)
    interval = torch.tensor([0.5, 0.4, 0.6, 0.0], dtype=torch.float64)
    check_told({"x" * 240: interval}, 2)
    with pytest.raises(ParcelRejected, match="is no interval and no histogram"):
        check_told({"x" * 241: interval}, 2)
    told = [(0.0, 0.0, 0.0, 0.0), (0.1, 0.1, 0.1, 0.0), (0.1, 0.0, 0.2, 0.0), (1.0, 1.0, 1.0, 0.0)]
    assert [_p(one) for one in told] == [1.0, 0.0, 0.0, 0.0]
    for value in (1.96, -1.96):
        assert _p((value, 0.0, 0.0, 1.0)) == pytest.approx(0.05, abs=1e-3)


def segmentation(masks, cases=None):
    part = part_of(np.zeros(len(masks), np.int64), masks=masks, cases=cases)
    site = site_of(None, SimpleNamespace(classes=()), part)
    site.trainer.task = SimpleNamespace(dense=True, like="segmentation", predictions=lambda said, _: said[:, 0])
    return site


BINS = {"bins": [4, 0, 0, 0, 1], "right": [4, 0, 0, 0, 0]}


def whole(told):
    return {name: torch.tensor(numbers) for name, numbers in told.items()}


@pytest.mark.parametrize("classes", [[0, 1], [0, 0], [1, 1]])
def test_whether_a_class_has_enough_images_is_0_or_1(classes):
    check_told(whole({"classes told": classes}), 2)
    check_told(whole({"classes told": classes, **BINS}), 2)


@pytest.mark.parametrize("classes", [[0, 2], [2, 1], [-1, 0]])
def test_another_number_is_refused_beside_a_histogram_that_holds(classes):
    with pytest.raises(ParcelRejected, match="'classes told' has numbers that no images have"):
        check_told(whole({"classes told": classes, **BINS}), 2)


@pytest.mark.parametrize(("name", "value", "low", "believed"), [
    ("auc", 0.5, 0.5 + 0.9e-6, True),  # as rounding leaves it
    ("auc", 0.5, 0.5 + 1.5e-6, False),
    ("mae", 1e6, 1e6 + 0.9, True),
    ("mae", 1e6, 1e6 + 1.5, False),
])  # fmt: skip
def test_a_value_lies_in_its_interval_up_to_rounding(name, value, low, believed):
    told = {name: torch.tensor([value, low, 2 * low, 0.0], dtype=torch.float64)}
    if believed:
        check_told(told, 2)
    else:
        with pytest.raises(ParcelRejected, match="has numbers that no images have"):
            check_told(told, 2)


def test_what_a_site_does_not_tell_is_not_said():
    interval = torch.tensor([0.5, 0.4, 0.6, 0.01], dtype=torch.float64)
    replies = [
        Reply("north", (Parcel("statistics", {"auc": interval}),)),
        Reply("south", (Parcel("statistics", {"classes told": torch.tensor([1, 0, 0])}),)),
    ]
    found = joined(replies, ("clear", "ill", "worse"))
    assert found["notes"] == ["site 'south' has no test image of ill, worse, or too few"]
    assert found["per_site"] == {"north": {"auc": [0.5, 0.4, 0.6, 0.01]}, "south": {}}
    site = binary(EVEN)
    site.data.test = part_of(EVEN[:0])
    assert EvaluateOnly().give_intervals(site, said(EVEN), against=said(EVEN)).tensors == {}
    federation = SimpleNamespace(trainer=SimpleNamespace(target=SimpleNamespace(classes=("clear", "ill"))))
    lie = SimpleNamespace(parcel=lambda kind: Parcel(kind, {"auc": torch.ones(5)}))
    method = EvaluateOnly()
    method.check_reply(federation, SimpleNamespace(operation="evaluate"), lie)
    with pytest.raises(ParcelRejected, match="'auc' is no interval"):
        method.check_reply(federation, SimpleNamespace(operation="give_intervals"), lie)


def test_a_second_model_is_of_the_same_network(tmp_path):
    file = tmp_path / "second.safetensors"
    write_tensors(file, {"w": torch.ones(2)})
    assert second_model(str(file), {"w": torch.zeros(2)}).tensors["w"].tolist() == [1, 1]
    for other in ({"w": torch.zeros(3)}, {"w": torch.zeros(2).double()}, {"v": torch.zeros(2)}):
        with pytest.raises(BadInput, match="has other tensors than the first model"):
            second_model(str(file), other)
