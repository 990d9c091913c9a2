"""Sums: second moments and histograms of few images tell who is behind them, and features of few come back."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
import torch
from json_schemas import assert_valid
from small_audits import first_view, opened
from torch.nn import functional as F

from polyclinic.audits.attack import Finding
from polyclinic.audits.attack_sums import (
    ComparedSet,
    FeatureDecoderAttack,
    SecondMomentsAttack,
    identify_in_classes,
    score_sets,
)
from polyclinic.audits.audit import audit
from polyclinic.audits.parcels import splits_behind
from polyclinic.audits.sum_layouts import (
    ALL,
    MOST,
    Gaussians,
    MomentMatrices,
    few_images,
    histogram_scores,
    leverage,
    moment_scores,
    read_sums,
    sums_like,
)
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.archive import is_worth_keeping, releases
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.shared import one_round
from polyclinic.metrics.roc import auc
from polyclinic.metrics.statistics.significance import chance_of_groups
from polyclinic.models.encoders import ENCODERS, Encoder
from polyclinic.randomness import numpy_rng, torch_rng
from polyclinic.runner.run.run import run

SETTINGS = {
    "audit.keep_parcels": 1, "sites.count": 2, "data.samples": 120, "data.test": 0.3, "data.validation": 0.3,
}  # fmt: skip


MANY_SEED = 3  # of the run that withstands: chances of both sites are above 0.2, those of the plants below 0.0002


class Sketch(Encoder):
    """Forty numbers of each image, by a fixed draw."""

    width: ClassVar[int] = 40

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        rows = images.flatten(1)
        return rows @ torch.randn(rows.shape[1], self.width, generator=torch_rng("sketch")) / 10


@pytest.fixture
def audited(tiny, tmp_path, monkeypatch, hurry):
    hurry(candidates=150, releases=2)
    monkeypatch.setitem(ENCODERS, "sketch", Sketch)

    def report_of(method: str, kind: str, changes: dict, sites: Sequence[str] = (), **settings) -> dict:
        folder = tmp_path / method
        run(tiny(method, {**SETTINGS, **changes}, **settings), folder)
        report = audit(folder, kinds=[kind], sites=sites)
        assert_valid(folder)
        return report

    return report_of


@pytest.mark.parametrize(
    ("method", "settings", "least"),
    [("analytic", {}, 0.95), ("gaussian-heads", {"rule": "naive-bayes"}, 0.5), ("fedpft", {}, 0.5)],
)
def test_sums_of_features_are_attacked(audited, method, settings, least):
    report = audited(method, "statistics", {"model.backbone": "sketch", "optimizer.augment": []}, **settings)
    (parcel,) = report["parcels"]
    (found,) = parcel["findings"]
    assert found["attack"] == "second-moments"
    assert found["question"] == "membership"
    assert found["evidence"]["features"] == 40
    assert found["evidence"]["images_behind"] == found["evidence"]["members"]
    assert found["evidence"]["auc"] > least
    if method == "analytic":  # fewer images than features: their space is told
        assert report["verdicts"]["statistics"]["verdict"] == "leaks"
    elif found["verdict"] != "leaks":
        assert found["power"] or found["doubt"]


def test_histograms_of_scores_are_attacked_over_all_rounds(audited, tmp_path):
    report = audited("fedavg", "metrics", {"optimizer.lr": 0.05}, rounds=4)
    first, last = report["parcels"]
    assert {one["attack"] for parcel in (first, last) for one in parcel["findings"]} == {"score-histograms"}
    assert first["findings"][0]["evidence"]["rounds"] >= 2
    assert report["verdicts"]["metrics"]["verdict"] == "leaks"
    assert first["findings"][0]["evidence"]["auc"] > 0.8
    kept = [one for one in releases(tmp_path / "fedavg/sites/site-1/kept") if one.operation == "evaluate"]
    assert {one.split for one in kept} == {"validation", "test"}


def test_sums_of_few_numbers_are_not_kept():
    assert not is_worth_keeping(Parcel("metrics", {"mae": torch.tensor(3.0), "count": torch.tensor(7)}, {}))
    assert not is_worth_keeping(Parcel("statistics", {"running_mean": torch.zeros(64)}, {}))
    assert is_worth_keeping(Parcel("metrics", {"histograms": torch.zeros(2, 2, 8)}, {}))
    assert is_worth_keeping(Parcel("statistics", {"products": torch.zeros(66, dtype=torch.int64)}, {}))


def rows(count: int, name: str, width: int = 12) -> np.ndarray:
    return numpy_rng("sum layouts", name).normal(0, 1, (count, width)).astype(np.float32)


LABELS = torch.arange(10) % 2


def class_sums(features: np.ndarray, squares: bool) -> Parcel:
    like = torch.zeros(2, 12 if squares else 78, dtype=torch.int64)
    empty = {"counts": torch.zeros(2, dtype=torch.int64), "first": torch.zeros(2, 12), "second": like}
    return sums_like(Parcel("statistics", empty, {}), features, LABELS)


def test_second_moments_are_read_as_they_were_summed():
    inside = rows(10, "inside")
    like = Parcel("statistics", one_round.moments(inside, torch.zeros(10, 2).double()).tensors(), {})
    sums = read_sums(like)
    assert isinstance(sums, MomentMatrices)
    assert sums.images == 10
    whole = np.concatenate([np.ones((10, 1)), inside], 1)
    torch.testing.assert_close(sums.by_class[ALL], torch.from_numpy(whole.T @ whole), atol=0.01, rtol=0.001)
    again = read_sums(sums_like(like, rows(10, "other"), LABELS))
    assert isinstance(again, MomentMatrices)
    others, own = (torch.from_numpy(one) for one in (rows(10, "other"), inside))
    assert auc(again.scores(others, LABELS), again.scores(own, LABELS)) == 1


@pytest.mark.parametrize("squares", [False, True])
def test_sums_of_classes_tell_their_images(squares):
    inside, outside = rows(10, "inside"), rows(200, "outside")
    sums = read_sums(class_sums(inside, squares))
    assert isinstance(sums, Gaussians if squares else MomentMatrices)
    assert sums.images == 10
    members = sums.scores(torch.from_numpy(inside), LABELS)
    others = sums.scores(torch.from_numpy(outside), torch.arange(200) % 2)
    assert auc(members, others) > (0.8 if squares else 0.99)


def test_sums_of_many_images_withstand(audited):
    """Six numbers of some 200 images a site, both sites attacked: no more is left open than single patients."""
    changes = {"model.backbone": "sketch", "optimizer.augment": [], "data.samples": 1000, "seed": MANY_SEED}
    report = audited("analytic", "statistics", changes, sites=["site-1", "site-2"], numbers=6)
    found = report["verdicts"]["statistics"]
    assert found["questions"]["membership"]["why"].startswith("single patients were not tested")
    assert found["sites_not_tested"] == []
    for parcel in report["parcels"]:
        (finding,) = parcel["findings"]
        assert finding["verdict"] == "withstood"
        (check,) = finding["power"]
        assert check["found"]
        assert 0.7 <= check["evidence"]["auc"] < 0.95  # a weak leak, and not a copy
        assert finding["evidence"]["images_per_feature"] > 20


def sums_of_all(features: np.ndarray, labels: list[int]) -> Parcel:
    targets = F.one_hot(torch.tensor(labels), max(labels) + 1).double()
    return Parcel("statistics", one_round.moments(features, targets).tensors(), {})


def same(found: torch.Tensor, wanted: np.ndarray) -> bool:
    """Equal in some order, up to the rounding of the sums."""
    far = torch.cdist(found.double(), torch.from_numpy(wanted).double())
    return float(far.min(0).values.max()) < 0.01


@pytest.mark.parametrize(("labels", "images", "vectors"), [
    ([0, 1], [1, 1], [1, 1]),  # each alone in its class
    ([0, 1, 1], [2, 1], [2, 1]),  # the other class is known, so that two are left
    ([0, 0, 1, 1], [2, 2], [1, 1]),  # second moments of both classes together: means alone
    ([0] * 20 + [1], [1], [1]),  # the mean of twenty shows none of them
    ([0] * 20 + [1] * 20, [], []),
])  # fmt: skip
def test_what_sums_over_all_classes_tell_of_few_images(labels, images, vectors):
    features = rows(len(labels), "all")
    found = few_images(sums_of_all(features, labels))
    assert [one.images for one in found] == images
    assert [len(one.vectors) for one in found] == vectors
    for one in found:
        own = features[np.array(labels) == one.label]
        assert same(one.vectors, own if len(one.vectors) == one.images else own.mean(0, keepdims=True))


@pytest.mark.parametrize(("squares", "vectors"), [(False, [1, 2, 1]), (True, [1, 1, 1])])
def test_what_sums_of_each_class_tell(squares, vectors):
    labels, features = torch.tensor([0, 1, 1, 2, 2, 2]), rows(6, "class")
    like = torch.zeros(3, 12 if squares else 78, dtype=torch.int64)
    empty = {"counts": torch.zeros(3, dtype=torch.int64), "first": torch.zeros(3, 12), "second": like}
    found = few_images(sums_like(Parcel("statistics", empty, {}), features, labels))
    assert [len(one.vectors) for one in found] == vectors
    assert same(found[0].vectors, features[:1])
    assert same(found[1].vectors, features[1:3] if not squares else features[1:3].mean(0, keepdims=True))


def test_a_regression_has_one_sum_and_mixtures_have_counts():
    alone = Parcel("statistics", one_round.moments(rows(2, "one"), torch.rand(2, 1).double()).tensors(), {})
    (found,) = few_images(alone)
    assert (found.label, found.images) == (ALL, 2)
    assert same(found.vectors, rows(2, "one"))
    mixture = {"0/shares": torch.ones(1), "0/means": torch.ones(1, 3), "0/variances": torch.ones(1, 3)}
    assert [one.images for one in few_images(Parcel("statistics", mixture, {"counts": [3]}))] == [3]
    assert few_images(Parcel("statistics", mixture, {"counts": [MOST + 1]})) == []
    assert few_images(Parcel("statistics", {"running_mean": torch.zeros(3)}, {})) == []


def pictures(count: int, name: str) -> torch.Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch_rng("few images", name))


def test_images_that_come_back_are_told_from_held_out_ones_at_chances_by_hand():
    assert chance_of_groups([(1, 1, 41), (1, 1, 41)], 2) == pytest.approx(1 / 41**2)
    assert chance_of_groups([(1, 1, 41), (1, 1, 41)], 1) == pytest.approx(1 - (40 / 41) ** 2)
    assert chance_of_groups([(2, 2, 4)], 2) == pytest.approx(1 / 6)
    assert chance_of_groups([(1, 1, 4)], 0) == 1
    sets = [ComparedSet(0.5 * pictures(1, n) + 0.2, pictures(1, n), pictures(40, f"held out {n}")) for n in "ab"]
    told = identify_in_classes(sets)
    assert (told.count, told.total, told.others) == (2, 2, 80)
    assert told.chance == told.reach == pytest.approx(1 / 41**2)
    assert score_sets(sets, torch.cat([one.held_out for one in sets])).verdict(0.001).leak


@pytest.mark.parametrize("found", [torch.full((1, 1, 8, 8), 0.5), torch.full((1, 1, 8, 8), torch.nan)])
def test_what_shows_nothing_points_to_nobody(found):
    sets = [ComparedSet(found, pictures(1, n), pictures(40, f"held out {n}")) for n in "ab"]
    assert identify_in_classes(sets).count == 0
    assert not score_sets(sets, torch.cat([one.held_out for one in sets])).verdict(0.001).leak


def test_the_mean_of_a_class_is_no_leak_nor_a_held_out_image_that_is_the_same():
    """Classes differ: the mean of a class is nearer to its images than the mean of all, and everybody knows it."""
    dark, bright = 0.3 * pictures(48, "dark"), 0.3 * pictures(48, "bright") + 0.7
    sets = [ComparedSet(one.mean(0, keepdim=True), one[:8], one[8:]) for one in (dark, bright)]
    result = score_sets(sets, torch.cat([one.held_out for one in sets]))
    assert not result.recovered.any()
    assert result.identified.chance > 0.01
    own = pictures(1, "own")
    assert identify_in_classes([ComparedSet(own, own, torch.cat([own, pictures(9, "others")]))]).count == 0


FEW = {
    "audit.keep_parcels": 0, "audit.own_images": "chest-phantom", "sites.count": 2, "data.samples": 60,
    "data.test": 0.9, "data.validation": 0.02, "model.backbone": "sketch", "optimizer.augment": [],
}  # fmt: skip


@pytest.fixture
def of_few(tiny, tmp_path, monkeypatch):
    """The folder of a run whose sites have two or three training images each."""
    monkeypatch.setitem(ENCODERS, "sketch", Sketch)
    run(tiny("analytic", FEW), tmp_path / "run")
    return tmp_path / "run"


def test_the_plant_has_the_same_sums_of_other_images(of_few, hurry):
    hurry(candidates=60)
    seen, truth = first_view(of_few, "statistics")
    (planted,) = FeatureDecoderAttack().planted(seen, truth)
    real, made = few_images(seen.parcel), few_images(planted.seen.parcel)
    assert [one.shape for one in real] == [one.shape for one in made]
    own = {image.numpy().tobytes() for image in truth.members(99)[0]}
    assert not own & {image.numpy().tobytes() for image in planted.truth.members(99)[0]}
    (found,) = FeatureDecoderAttack().attack(planted.seen, planted.truth)
    assert isinstance(found, Finding)
    assert found.question == "images"


def test_sums_of_validation_images_are_asked_about_those(tiny, tmp_path, monkeypatch):
    """`give_held_out_sums` sums validation images: asked about training images, they would look harmless."""
    monkeypatch.setitem(ENCODERS, "sketch", Sketch)
    changes = {**FEW, "data.samples": 80, "data.test": 0.3, "data.validation": 0.3}
    folder = tmp_path / "run"
    run(tiny("analytic", changes, worth=True), folder)
    tools, wanted = opened(folder, "statistics")
    splits = {one.release.operation: splits_behind(one.release, tools.assembly.study) for one in wanted}
    assert splits == {"give_sums": ("train",), "give_held_out_sums": ("validation",)}
    (held_out,) = [one for one in wanted if one.release.operation == "give_held_out_sums"]
    data, truth = tools.site_data(held_out.site), held_out.truth(tools)
    assert np.array_equal(truth.data.train.images, data.validation.images)
    assert np.array_equal(truth.held_out(999)[0].numpy(), np.asarray(data.test.images))
    (found,) = SecondMomentsAttack().attack(held_out.seen(tools), truth)
    assert isinstance(found, Finding)
    assert found.verdict.evidence["auc"] > 0.95
    assert found.verdict.leak


FEATURES = 40


def vectors(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed)).relu() + 0.1


def area(count: int) -> float:
    """How well members are told from as many others by the second moments of `count` vectors."""
    inside, outside = vectors(count, 0), vectors(count, 1)
    moments = inside.double().T @ inside.double()
    return auc(moment_scores(moments, inside), moment_scores(moments, outside))


def test_fewer_vectors_than_features_are_all_told_and_with_more_of_them_less_is():
    assert area(10) == area(30) == 1.0
    few, some, many = area(60), area(200), area(4000)
    assert few > 0.9
    assert few > some > 0.55
    assert abs(many - 0.5) < 0.06


def test_leverage_by_hand():
    """X'X = diag(4, 1): the vectors (2, 0) and (0, 1) have all of an axis each."""
    inside, outside = leverage(torch.diag(torch.tensor([4.0, 1.0, 0.0])), torch.tensor([[2.0, 0, 0], [1.0, 0, 1.0]]))
    assert inside.tolist() == pytest.approx([1.0, 0.25])
    assert outside.tolist() == pytest.approx([0.0, 0.5])
    with pytest.raises(BadInput, match="no square of the 3 features"):
        leverage(torch.eye(2), torch.ones(1, 3))


def test_scores_of_a_small_site_lie_in_its_histogram():
    edges = torch.linspace(-4, 4, 1023)
    rng = torch.Generator().manual_seed(0)
    rounds = [torch.randn(40, generator=rng) for _ in range(2)]  # 20 images that were there, 20 others
    counts = [torch.bucketize(one[:20], edges).bincount(minlength=1024) for one in rounds]
    once, again = (histogram_scores(one, scores, edges) for one, scores in zip(counts, rounds, strict=True))
    twice = once + again
    assert auc(once[:20], once[20:]) > 0.9
    assert auc(twice[:20], twice[20:]) >= auc(once[:20], once[20:])
    flat = histogram_scores(torch.tensor([20]), rounds[0], torch.zeros(0))  # one wide bin tells nothing
    assert auc(flat[:20], flat[20:]) == 0.5
