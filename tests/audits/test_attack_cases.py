"""Audits of studies of volumes: membership by case with its power, and what is said of attacks that are for images."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_audits import opened

from polyclinic.audits import attack_cases, attack_patches
from polyclinic.audits.attack_cases import CasesAsked, losses_of_cases, remembering, scores_of_references, trainer_of
from polyclinic.audits.attack_patches import PatchDecoderAttack
from polyclinic.audits.audit import audit
from polyclinic.audits.hidden_volumes import correlation, hidden_patches
from polyclinic.audits.truth import Truth, without_repeats
from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.data.volumes.volume import Volume, rows_of
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.metrics.roc import auc
from polyclinic.metrics.statistics.significance import chance_of_order

VOLUMES = {
    "data": {"source": "brain-volumes", "samples": 32, "shape": [20, 20, 12], "size": [16, 16, 8], "test": 0.4},
    "sites": {"partition": "iid", "count": 1},
    "task": {"name": "volume-segmentation", "patches": 8, "surface_distances": False},
    "model": {"backbone": "dynunet", "norm": "instance", "arguments": {"filters": [4, 8, 8]}},
    "optimizer": {"name": "adam", "lr": 0.01, "batch_size": 4},
    "audit.keep_parcels": 0,
}


@pytest.fixture(autouse=True)
def few_patches(monkeypatch):
    monkeypatch.setattr(attack_cases, "PATCHES", 4)


@pytest.fixture(scope="module")
def run(tiny, undisturbed):
    return undisturbed(tiny("fedavg", VOLUMES, rounds=1)).folder


@pytest.fixture
def first(run):
    tools, (parcel, *_) = opened(run, "weights")
    return parcel.seen(tools), parcel.truth(tools)


def test_the_planted_leak_is_as_weak_as_so_many_cases_can_show():
    assert attack_cases.goal_of(200, 200) == attack_cases.WEAKEST
    few = attack_cases.goal_of(10, 12)
    assert attack_cases.WEAKEST < few < attack_cases.goal_of(8, 8) <= attack_cases.MOST_AREA
    places = np.arange(22)  # a rank test of ten cases among twelve finds it at the level of an audit of three tests
    order = np.random.default_rng(0).permuted(np.tile(places, (4000, 1)), axis=1)[:, :10]
    areas = (order.sum(1) - 45) / 120
    just = order[np.abs(areas - few).argmin()]
    assert chance_of_order(just.astype(float), np.setdiff1d(places, just).astype(float)) < 0.01 / 3


def test_a_model_that_remembers_cases_is_told_from_one_that_does_not(first, monkeypatch):
    monkeypatch.setattr(attack_cases, "goal_of", lambda members, others: 0.75)
    seen, truth = first
    part, half = truth.part_held_out(16), 8
    weights, area = remembering(seen, part, half)
    assert area >= 0.75
    trainer = trainer_of(seen)
    trainer.load(weights)
    losses = losses_of_cases(trainer, part)
    assert auc(-losses[:half], -losses[half:]) == pytest.approx(area)
    trainer.load(seen.network.state_dict())  # the same cases are always asked about in the same patches
    assert torch.equal(losses_of_cases(trainer, part), losses_of_cases(trainer, part))


def test_references_see_half_of_the_cases_each_wherever_members_stand(first, monkeypatch):
    monkeypatch.setattr(attack_cases, "STEPS", 1)
    seen, truth = first
    part = CasesAsked(seen, truth).part.take(np.arange(6))
    scores, inside = scores_of_references(seen, part, 4)
    turned = np.arange(6)[::-1].copy()
    other, moved = scores_of_references(seen, part.take(turned), 4)
    assert inside.sum(0).tolist() == [2] * 6
    assert torch.equal(moved, inside[:, turned])
    torch.testing.assert_close(other, scores[:, turned])


def test_an_audit_answers_membership_by_case_and_names_what_is_not_tested(run, monkeypatch):
    for name in ("PASSES", "STEPS"):
        monkeypatch.setattr(attack_cases, name, 1)
    report = audit(run)
    weights = report["verdicts"]["weights"]
    assert set(weights["questions"]["membership"]["attacks"]) == {"loss-threshold", "rmia", "lira"}
    images = weights["questions"]["images"]
    assert images["verdict"] == "not tested"
    assert "no form for volumes yet" in images["why"]
    (parcel,) = report["parcels"]
    assert parcel["recomputed"]
    assert all(check["words"].count("cases") for one in parcel["findings"] for check in one["power"])
    assert report["level"] == pytest.approx(0.01 / 3)
    assert json.loads((run / "audit.json").read_text())["complete"]


def test_a_held_out_case_that_was_also_trained_on_is_not_held_out():
    image, mask = np.ones((1, 4, 4, 4), np.float16), np.zeros((4, 4, 4), np.uint8)
    same, other = (Volume(image * number, mask, (1.0, 1.0, 1.0)) for number in (1, 2))
    train, test = (ImageSet(rows_of(some), np.zeros(len(some))) for some in ([same], [same, other]))
    assert len(without_repeats(SiteData("a", train, train.take(np.arange(0)), test)).test) == 1


def volume_of(rng, sides=(24, 20, 16)):
    smooth = np.cumsum(np.cumsum(rng.standard_normal((1, *sides)), 1), 2)
    return Volume((smooth / smooth.std()).astype(np.float16), np.zeros(sides, np.uint8), (1.0, 1.0, 1.0))


def test_a_patch_is_found_at_its_place_mirrored_scaled_or_not_at_all():
    rng = np.random.default_rng(0)
    voxels, other = (torch.from_numpy(volume_of(rng).image[0].astype(np.float32)) for _ in range(2))
    patch = voxels[5:15, 3:13, 4:12]
    assert correlation(voxels, patch) == pytest.approx(1, abs=1e-6)
    assert correlation(voxels, 7 - 3 * patch.flip(0, 2)) == pytest.approx(1, abs=1e-6)
    assert correlation(other, patch) < 0.9
    padded = torch.nn.functional.pad(voxels, (4, 4))  # a patch beyond the volume has zeros there
    assert correlation(voxels, padded - 0.0) > 0.9


def test_a_patch_that_lies_in_a_parcel_is_a_leak_and_a_kernel_is_none():
    rng = np.random.default_rng(0)
    volumes = rows_of([volume_of(rng) for _ in range(8)])
    train, test = (ImageSet(some, np.zeros(4)) for some in (volumes[:4], volumes[4:]))
    truth = Truth([], SiteData("a", train, train.take(np.arange(0)), test), 0)
    image = torch.from_numpy(train.images[2].image.astype(np.float32))
    kernel = torch.randn(8, 4, 3, 3, 3)

    def found(tensor):
        parcel = Parcel("weights", {"kernel": kernel, "other": tensor})
        return hidden_patches(SimpleNamespace(parcel=parcel), truth)

    (leak,) = found(image[None, :, 2:14, 2:14, 2:14].flip(2) * 0.01)
    assert leak.verdict.leak
    assert "'other' show a patch of a training volume" in str(leak.verdict)
    assert found(torch.randn(1, 2, 12, 12, 12)) == []
    held_out = torch.from_numpy(test.images[1].image.astype(np.float32))
    assert found(held_out[None, :, 2:14, 2:14, 2:14]) == []


def test_latents_of_patches_are_decoded_and_found(tiny, undisturbed, monkeypatch):
    monkeypatch.setattr(attack_patches, "MOST_NUMBERS", 0)  # a smaller decoder, which is quicker
    changes = {"model.arguments": {"filters": [16, 8, 8]}, "data.samples": 16, "task.patches": 2}
    folder = undisturbed(tiny("fedreplay", {**VOLUMES, **changes}, rounds=1)).folder
    tools, (parcel, *_) = opened(folder, "latents")
    seen, truth = parcel.seen(tools), parcel.truth(tools)
    (found,) = PatchDecoderAttack().attack(seen, truth)
    assert found.question == "images"
    figures = found.verdict.evidence
    assert figures["correlation"] > 0.7
    assert figures["correlation"] > figures["held_out"] + 0.2
