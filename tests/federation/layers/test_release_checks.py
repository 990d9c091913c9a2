"""What happens to an operation's parcels before the gate, by hand: privacy, coarse scores, and patients behind them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.federation.call import Call, GateRefused, GateRefusedData
from polyclinic.federation.layers.cohort import (
    DrawnPatients,
    check_classes,
    check_more_images_than,
    count_patients,
    fewest_patients,
    images_in_private_step,
    patients_behind,
)
from polyclinic.federation.layers.leaving import check_private, coarse_scores, without_loss
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.policy import Policy

W = {"w": torch.ones(1)}
RECORD = {"epsilon": 1.0, "mechanisms": [{"steps": 1, "sampling_rate": 0.25}]}


def part(cases, labels=None):
    """An image of each of these patients."""
    count = len(cases)
    images = np.zeros((count, 1, 2, 2), np.uint8)
    return ImageSet(images, np.array(labels if labels is not None else [0] * count), cases=np.array(cases))


DATA = SiteData("a", part([1, 1, 2, 3, 4, 5, 6, 7]), part([8, 9, 9]), part([10]))


def turn(used=(), data=DATA, splits=("train",), made=(), **trainer):
    site = SimpleNamespace(data=data, trainer=SimpleNamespace(**trainer))
    used = [torch.tensor(batch) for batch in used]
    return SimpleNamespace(site=site, used=used, call=Call("a", "train", 1), splits=splits, made=made)


def private(on=("classifier",), cover="updates", score_noise=None):
    return SimpleNamespace(
        trainer=SimpleNamespace(privacy=SimpleNamespace(on=on, cover=cover, score_noise=score_noise))
    )


def test_what_is_not_private_or_not_covered_does_not_leave():
    for kind in ("weights", "gradients"):
        with pytest.raises(LookupError, match=f"'train' trained {kind} without differential privacy"):
            check_private(private(), "train", [Parcel("metrics", W), Parcel(kind, W)])
        check_private(private(), "train", [Parcel(kind, W, privacy=RECORD)])
        check_private(private(on=("generator",)), "train", [Parcel(kind, W)])
        check_private(SimpleNamespace(trainer=SimpleNamespace(privacy=None)), "train", [Parcel(kind, W)])
        check_private(SimpleNamespace(trainer=None), "train", [Parcel(kind, W)])
    check_private(private(), "train", [Parcel("metrics", W), Parcel("statistics", W)])
    statistics = Parcel("statistics", W)
    check_private(private(), "give", [statistics])
    with pytest.raises(
        GateRefused, match=r"'give' releases statistics that nothing covers, and privacy\.cover is 'all'"
    ):
        check_private(private(cover="all"), "give", [statistics])
    with pytest.raises(GateRefused, match="'give' releases statistics"):
        check_private(private(on=(), cover="all"), "give", [statistics])
    scores = Parcel("metrics", W, privacy=RECORD)
    with pytest.raises(GateRefused, match="releases metrics"):
        check_private(private(cover="all"), "evaluate", [scores])
    check_private(private(cover="all", score_noise=2.0), "evaluate", [scores])
    told = Parcel("weights", W, {"loss": 0.5, "samples": 3})
    assert without_loss(told).metadata == {"samples": 3}
    plain = Parcel("weights", W, {"samples": 3})
    assert without_loss(plain) is plain


class Coarse:
    def coarse(self, sums, least, target):
        return {name: torch.tensor(float(least)) for name in sums}


@pytest.mark.parametrize(("least", "told"), [(0, 1.0), (1, 1.0), (2, 2.0), (9, 9.0)])
def test_scores_are_as_coarse_as_the_smallest_cohort(least, told):
    scores = Parcel("metrics", {"test_auc": torch.tensor(0.5)})
    asked, training = (
        turn(task=Coarse(), target=None, splits=splits) for splits in (("test",), ("train", "validation"))
    )
    found = coarse_scores(Policy(min_cohort=least), asked, scores)
    assert float(found.tensors["test_auc"]) == told
    fine = Policy(min_cohort=least, scores="fine")
    assert coarse_scores(fine, asked, scores) is scores
    assert list(coarse_scores(fine, training, scores).tensors) == []
    empty = Parcel("metrics", {})
    assert coarse_scores(Policy(min_cohort=least), asked, empty) is empty
    other = Parcel("weights", W, {"loss": 1.0})
    assert coarse_scores(Policy(min_cohort=least), training, other) is other


def spec(max_epsilon=None, generator=None):
    study = SimpleNamespace(generator=generator)
    return SimpleNamespace(policy=Policy(max_epsilon=max_epsilon), study=study)


@pytest.mark.parametrize(("parcel", "used", "settings", "patients"), [
    (Parcel("weights", W), [[0, 1, 2], [2, 3]], {}, 3),
    (Parcel("weights", W), [], {}, 7),
    (Parcel("weights", W, privacy=RECORD), [[0]], {}, 1),  # a quarter of 8 images may be those of patient 1
    (Parcel("weights", W, privacy=RECORD), [[0]], {"max_epsilon": 3.0}, 7),
    (Parcel("generator", W), [[0]], {"generator": SimpleNamespace(batch_size=4)}, 3),
    (Parcel("synthetic-images", W), [[0]], {"generator": SimpleNamespace(batch_size=8)}, 7),
])  # fmt: skip
def test_patients_behind_a_parcel(parcel, used, settings, patients):
    assert patients_behind(spec(**settings), turn(used), parcel) == patients


def test_patients_are_those_of_the_smallest_split_or_batch():
    weights, nothing = Parcel("weights", W), Parcel("weights", {}, {"samples": 3})

    def count(splits, made):
        return count_patients(spec(), turn([[0, 2]], splits=splits, made=[made]))

    assert count(("train",), weights) == 2
    assert count(("train",), nothing) == 7
    assert count(("validation", "test"), weights) == 1
    assert count(("train", "validation"), weights) == 2
    assert count(("validation",), weights) == 2


@pytest.mark.parametrize(("used", "least", "refused"), [
    ([[0, 1]], 2, True),  # two images of one patient
    ([[0, 1]], 3, False),  # too few images, which is public: the gate says so
    ([[0, 1]], 1, False),
    ([[0, 0, 2]], 2, False),  # two patients
    ([[0], [1, 2]], 3, True),
    ([], 0, False),
    ([], 9, False),
])  # fmt: skip
def test_drawn_images_of_too_few_patients_suspend(used, least, refused):
    layer = DrawnPatients(SimpleNamespace(spec=SimpleNamespace(policy=Policy(min_cohort=least)), sites=None))
    if not refused:
        assert layer.leaving(turn(used), ("made",)) == ("made",)
        return
    with pytest.raises(GateRefusedData, match=f"'train': {least} images were drawn, of fewer than min_cohort patients"):
        layer.leaving(turn(used), ())


@pytest.mark.parametrize(("least", "refused"), [(0, None), (1, None), (2, 1), (3, 0), (4, 0)])
def test_a_class_of_few_patients_is_named(least, refused):
    """Class 0 has patients 1, 2 and class 1 has patient 3 with two images."""
    data = SiteData("a", part([1, 2, 3, 3], [0, 0, 1, 1]), DATA.validation, DATA.test)
    trainer = SimpleNamespace(task=SimpleNamespace(like="classification"))
    site = SimpleNamespace(data=data, trainer=trainer, min_cohort=least)
    if refused is None:
        check_classes(site)
    else:
        with pytest.raises(GateRefusedData, match=f"class {refused} has training images of fewer than min_cohort"):
            check_classes(site)
    trainer.task.like = "regression"
    check_classes(site)


@pytest.mark.parametrize(
    ("images", "policy", "refused"),
    [*((0, "refuse", False), (1, "refuse", True), (8, "refuse", True), (9, "refuse", False)), (8, "allow", False)],
)
def test_sums_of_products_want_more_images_than_features(images, policy, refused):
    site = SimpleNamespace(policy=SimpleNamespace(few_images=policy))
    if not refused:
        check_more_images_than(8, site, images)
        return
    with pytest.raises(GateRefusedData, match=f"of 8 features of {images} images give the features of single"):
        check_more_images_than(8, site, images)


@pytest.mark.parametrize(
    ("cases", "batch", "patients"),
    [(None, 3, 3), (None, 9, 5), ([1, 1, 1, 2, 3], 3, 1), ([1, 1, 1, 2, 3], 4, 2), ([1, 1, 1, 2, 3], 99, 3)],
)
def test_the_fewest_patients_of_a_batch(cases, batch, patients):
    images = ImageSet(np.zeros((5, 1, 2, 2), np.uint8), np.zeros(5), cases=None if cases is None else np.array(cases))
    assert fewest_patients(images, batch) == patients


def test_a_private_step_takes_as_many_images_as_its_smallest_rate_says():
    private = {"steps": 1, "sampling_rate": 0.25}
    assert images_in_private_step({"mechanisms": [private, {"steps": 3, "sampling_rate": 0.5}]}, 40) == 10
    assert images_in_private_step({"mechanisms": [{"steps": 0, "sampling_rate": 0.01}]}, 40) == 40
    assert images_in_private_step({}, 40) == 0
