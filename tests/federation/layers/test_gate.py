"""What may leave: checks of releases, and the gate."""

import math
from types import SimpleNamespace

import numpy as np
import one_site
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
from polyclinic.federation.layers.gate import Gate, RawImages, ThroughGate
from polyclinic.federation.layers.leaving import check_private, coarse_scores, without_loss
from polyclinic.federation.ledger.kinds import KINDS
from polyclinic.federation.ledger.ledger import Ledger, verify
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import Transaction, operation
from polyclinic.federation.policy import DEFAULT_KINDS, Policy

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
    privacy = SimpleNamespace(on=on, cover=cover, score_noise=score_noise)
    return SimpleNamespace(trainer=SimpleNamespace(privacy=privacy))


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
    asked, training = (turn(task=Coarse(), target=None, splits=some) for some in (("test",), ("train", "validation")))
    found = coarse_scores(Policy(deployed=True, min_cohort=least), asked, scores)
    assert float(found.tensors["test_auc"]) == told
    simulated = coarse_scores(Policy(min_cohort=least), asked, scores)
    assert float(simulated.tensors["test_auc"]) == 10  # the cohort that a deployed site's policy comes with
    fine = Policy(deployed=True, min_cohort=least, scores="fine")
    assert coarse_scores(fine, asked, scores) is scores
    assert list(coarse_scores(fine, training, scores).tensors) == []
    empty = Parcel("metrics", {})
    assert coarse_scores(Policy(deployed=True, min_cohort=least), asked, empty) is empty
    other = Parcel("weights", W, {"loss": 1.0})
    assert coarse_scores(Policy(deployed=True, min_cohort=least), training, other) is other


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


def test_patients_of_splits_batches_and_private_steps():
    weights, nothing = Parcel("weights", W), Parcel("weights", {}, {"samples": 3})

    def count(splits, made):
        return count_patients(spec(), turn([[0, 2]], splits=splits, made=[made]))

    assert count(("train",), weights) == 2
    assert count(("train",), nothing) == 7
    assert count(("validation", "test"), weights) == 1
    assert count(("train", "validation"), weights) == 2
    assert count(("validation",), weights) == 2
    private = {"steps": 1, "sampling_rate": 0.25}
    assert images_in_private_step({"mechanisms": [private, {"steps": 3, "sampling_rate": 0.5}]}, 40) == 10
    assert images_in_private_step({"mechanisms": [{"steps": 0, "sampling_rate": 0.01}]}, 40) == 40
    assert images_in_private_step({}, 40) == 0


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


SHAPE = (3, 8, 8)


def pictures(seed, count=6, shape=SHAPE):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


OWN = pictures(1)


@pytest.fixture
def make_gate(tmp_path):
    def make(images=(OWN,), **policy):
        policy = Policy(**{"kinds": tuple(KINDS), **policy})
        return Gate("north", policy, Ledger(tmp_path / "north.jsonl"), RawImages(*images))

    return make


def release(gate, *parcels):
    return gate.release(parcels, round=2, operation="train", to="coordinator")


def refused(gate, *parcels) -> str:
    """The sentence of the refusal, with proof that nothing was written."""
    lines = gate.ledger.position.lines
    with pytest.raises(GateRefused) as refusal:
        release(gate, *parcels)
    assert gate.ledger.position.lines == lines
    assert len(verify(gate.ledger.path) if gate.ledger.path.exists() else []) == lines
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize("kind", ["real-images", "labels", "masks"])
def test_images_labels_and_masks_leave_only_where_a_policy_says_so(make_gate, kind):
    refused(make_gate(kinds=DEFAULT_KINDS), Parcel(kind, {}))
    release(make_gate(kinds=(kind,)), Parcel(kind, {}))


FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_in_a_tensor_stays(make_gate, dtype):
    tensor = torch.ones(4, 4).to(dtype)
    release(make_gate(), Parcel("weights", {"fc.bias": tensor}))
    tensor[3, 3] = torch.tensor(math.nan).to(dtype)
    sentence = refused(make_gate(), Parcel("weights", {"fine": torch.ones(1), "fc.bias": tensor}))
    assert sentence.startswith("site 'north' kept back weights of 'train': tensor 'fc.bias' holds NaN or infinity")


@pytest.mark.parametrize("value", [math.nan, -math.inf, [0.5, math.nan], {"per class": {"a": [math.inf]}}])
def test_nan_in_metadata_stays_however_deep(make_gate, value):
    sentence = refused(make_gate(), Parcel("weights", {"a": torch.ones(1)}, {"samples": 3, "loss": value}))
    assert sentence.startswith("site 'north' kept back weights of 'train': 'loss' is ")


def as_floats(images):
    return torch.from_numpy(images).float() / 255


DISGUISES = {
    "bytes": torch.from_numpy(OWN[2:3]),
    "one image without a batch axis": torch.from_numpy(OWN[2]),
    "floats in [0, 1]": as_floats(OWN[2:3]),
    "float64": as_floats(OWN[2:3]).double(),
    "half precision": as_floats(OWN[2:3]).half(),
    "bfloat16": as_floats(OWN[2:3]).bfloat16(),
    "floats up to 255": torch.from_numpy(OWN[2:3]).float(),
    "whole numbers": torch.from_numpy(OWN[2:3]).long(),
    "among others": torch.cat([as_floats(pictures(5)), as_floats(OWN[2:3]), as_floats(pictures(6))]),
    "beside numbers above 1": torch.cat([3 * torch.randn(4, *SHAPE), as_floats(OWN[2:3])]),
    "with more axes": as_floats(np.stack([pictures(5, 4), OWN[:4]]))[:, None],
    "flattened": as_floats(OWN[2:4]).flatten(1),
    "flattened with the batch": as_floats(OWN[2:3]).flatten(),
    "pixels in a row": as_floats(OWN[2:4]).flatten(2),
    "not contiguous": as_floats(OWN[2:4]).transpose(-1, -2).contiguous().transpose(-1, -2),
    "with a gradient": as_floats(OWN[2:4]).requires_grad_(),
}


@pytest.mark.parametrize("disguise", DISGUISES)
def test_own_images_stay(make_gate, disguise):
    sentence = refused(make_gate(), Parcel("weights", {"fine": torch.ones(2), "conv": DISGUISES[disguise]}))
    assert sentence == "site 'north' kept back weights of 'train': tensor 'conv' holds images of the site itself"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "real-images"])
def test_own_images_stay_whatever_they_are_called(make_gate, kind):
    refused(make_gate(), Parcel(kind, {"x": as_floats(OWN)}))


def test_images_that_were_validated_or_tested_on_are_own_ones_and_others_may_leave(make_gate):
    gate = make_gate(images=(OWN, pictures(2), pictures(3, 0), pictures(4)))
    for seed in (1, 2, 4):
        refused(gate, Parcel("synthetic-images", {"x": as_floats(pictures(seed)[3:4])}))
    release(gate, Parcel("synthetic-images", {"x": as_floats(pictures(3))}))
    others = as_floats(pictures(99))
    assert release(make_gate(), Parcel("synthetic-images", {"x": others}))
    near = as_floats(OWN).clone()
    near[:, 0, 0, 0] = (near[:, 0, 0, 0] + 0.5) % 1
    assert release(make_gate(), Parcel("synthetic-images", {"x": near}))


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_if_one_parcel_stays_all_stay(make_gate, bad):
    """A line in the ledger says that bytes left; the parcel before the refused one did not."""
    gate = make_gate()
    sent = {"gradients": {"a": torch.ones(2)}, "statistics": {"b": torch.ones(2)}, "labels": {}}
    parcels = [Parcel(kind, tensors) for kind, tensors in sent.items()]
    parcels[bad] = Parcel(parcels[bad].kind, {"c": torch.tensor(math.nan)})
    refused(gate, *parcels)


class Asked:
    @operation("metrics", "statistics", "latents", "masked")
    def train(self, site): ...

    @operation("statistics", most={"statistics": 2**20})
    def give_sums(self, site): ...


def leaves(gate, parcel, declared=Asked.train):
    """Through the site's gate, after an operation of a site with twenty images of 16 px in each split made it."""
    host = SimpleNamespace(
        spec=SimpleNamespace(policy=gate.policy), sites=SimpleNamespace(gates={"north": gate}), by_reference=False
    )
    transaction = Transaction(Call("north", "train", 1), declared, declared.operation)
    transaction.site, transaction.made = one_site.make_site(), (parcel,)
    transaction.site.study.method = SimpleNamespace(buffer=10_000)
    return ThroughGate(host).leaving(transaction, (Parcel("masked", {"numbers": torch.ones(3)}),))


def test_images_under_the_name_of_metrics_are_too_many_numbers(make_gate):
    """15 MB of images, scaled to [-1, 1], which the look for raw images does not find; also behind a sum's masks."""
    images = torch.from_numpy(pictures(1, count=320, shape=(3, 128, 128))).float() / 127.5 - 1
    for kind in ("metrics", "statistics"):
        with pytest.raises(GateRefused, match=f"kept back {kind} of 'train': 15728640 numbers, and 'train' declares"):
            leaves(make_gate(), Parcel(kind, {"loss": images}))
        assert leaves(make_gate(), Parcel(kind, {"loss": images.flatten()[: 3 * 2**14]}))
        with pytest.raises(GateRefused, match="at most 49152 of"):
            leaves(make_gate(), Parcel(kind, {"loss": images.flatten()[: 3 * 2**14 + 1]}))
    assert leaves(make_gate(), Parcel("statistics", {"products": torch.ones(2**20)}), Asked.give_sums)
    with pytest.raises(GateRefused, match="at most 1048576 of statistics"):
        leaves(make_gate(), Parcel("statistics", {"products": torch.ones(2**20 + 1)}), Asked.give_sums)
    with pytest.raises(GateRefused, match="where at most 7864320 can be"):
        leaves(make_gate(), Parcel("latents", {"latents": torch.ones(60, 2**18)}))
    with pytest.raises(GateRefused, match="where at most 15360 can be"):
        leaves(make_gate(), Parcel("labels", {"labels": images.flatten()[:15361]}))
    for kind in ("weights", "gradients", "generator"):
        with pytest.raises(GateRefused, match=f"kept back {kind} of 'train': 15728640 numbers, where at most 37090"):
            leaves(make_gate(), Parcel(kind, {"fc.weight": images}))
    for kind, most in (("codes", 15360), ("synthetic-images", 122880), ("keys", 2097184), ("shares", 7471218)):
        with pytest.raises(
            GateRefused, match=f"kept back {kind} of 'train': 15728640 numbers, where at most {most} can"
        ):
            leaves(make_gate(), Parcel(kind, {"x": images}))
        assert leaves(make_gate(), Parcel(kind, {"x": images.flatten()[:most]}))
    declares = {"synthetic-images": lambda method, site: method.buffer * len(site.data.train)}
    declared = SimpleNamespace(operation=Asked.train.operation._replace(most=declares))
    assert leaves(make_gate(), Parcel("synthetic-images", {"x": images.flatten()[:200_000]}), declared)
    with pytest.raises(GateRefused, match="200001 numbers, where at most 200000 can be"):
        leaves(make_gate(), Parcel("synthetic-images", {"x": images.flatten()[:200_001]}), declared)
    with pytest.raises(GateRefused, match="metadata is longer than 1048576 bytes"):
        leaves(make_gate(), Parcel("metrics", {}, {"pixels": [0.25] * 200_000}))
