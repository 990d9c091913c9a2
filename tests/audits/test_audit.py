"""Audits of small runs: each kind of parcel with what fits it, held against the ledger, honest about what was done."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from json_schemas import assert_valid

from polyclinic.attacks.attack import Capability
from polyclinic.attacks.gradient_inversion.settings import GradientInversion
from polyclinic.audits import ATTACKS, attack_membership, attack_updates
from polyclinic.audits import audit as audit_module
from polyclinic.audits.audit import audit
from polyclinic.audits.views import Finding, Seen, Tools, Truth
from polyclinic.data.parts import SiteData, open_site, prepare
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.leaving.archive import ATTACKABLE_KINDS, SUM_KINDS, releases
from polyclinic.metrics.perceptual import Pixels
from polyclinic.runner.assembly import Assembly
from polyclinic.study import audit_settings
from polyclinic.study.audit_settings import Audit

MASKS = {
    "data.source": "brain-phantom", "data.samples": 60, "task.name": "segmentation", "model.backbone": "unet",
}  # fmt: skip
#: methods whose audits are drawn, which takes longer than some attacks: with them every kind of picture is looked at
DRAWN = ("fedavg", "splitnn", "fedreplay", "cwt-replay")
MEMBERSHIP = {"loss-threshold", "rmia", "lira", "site-inference"}
SMALL = {"audit.keep_parcels": 0, "sites.count": 2, "data.test": 0.4}
GENERATOR = {
    "generator.name": "vqvae2", "generator.epochs": 1, "generator.prior_epochs": 1, "generator.width": 8,
    "generator.top_codes": 8, "generator.bottom_codes": 8, "generator.prior_width": 8, "generator.prior_layers": 1,
    "replay.probe": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _hurried(hurry, monkeypatch) -> None:
    hurry(projected=6, candidates=25)
    monkeypatch.setattr(attack_membership, "PASSES", 2)  # a planted memory may stay weak here


@pytest.fixture(scope="module")
def finished() -> dict[str, Path]:
    """Folders of audited runs, by study."""
    return {}


@pytest.fixture
def audited(tiny, undisturbed, tmp_path, tmp_path_factory, finished):
    """`audited("fedavg", rounds=1)`: the report on such a run, and a copy of its folder. A study is audited once."""

    def report_of(method: str, changes: dict | None = None, **method_settings):
        study = tiny(method, {**SMALL, **(changes or {})}, **{"rounds": 1, **method_settings})
        key = json.dumps(study.as_tables(), sort_keys=True)
        if key not in finished:
            folder = tmp_path_factory.mktemp("audited") / method
            shutil.copytree(undisturbed(study).folder, folder)
            with pytest.MonkeyPatch.context() as patch:
                if method not in DRAWN:
                    patch.setattr(audit_module, "_draw_plot", lambda draw, path: False)
                audit(folder)
            assert_valid(folder)
            finished[key] = folder
        folder = tmp_path / method
        shutil.copytree(finished[key], folder)
        return json.loads((folder / "audit.json").read_text()), folder

    return report_of


@pytest.mark.parametrize(
    ("method", "changes", "attacks"),
    [
        ("fedavg", {}, {"weights": {"gradient-inversion", *MEMBERSHIP}}),
        ("fedprox", {}, {"weights": {"gradient-inversion", *MEMBERSHIP}}),
        ("fedbn", {"model.backbone": "small-cnn"}, {"weights": {"gradient-inversion"}}),
        ("fedsgd", {}, {"gradients": {"gradient-inversion"}}),
        ("fedavg", MASKS, {"weights": {"gradient-inversion", *MEMBERSHIP}}),
        ("cwt", {"optimizer.name": "adam"}, {"weights": {"gradient-inversion", *MEMBERSHIP}}),
        ("fedavg-share", {}, {"weights": {"gradient-inversion", *MEMBERSHIP}}),
        (
            "splitnn",
            {"model.backbone": "small-cnn"},
            {"activations": {"latent-inversion", "learned-decoder"}, "weights": {"gradient-inversion"}},
        ),
        ("fedreplay", {}, {"latents": {"latent-inversion", "learned-decoder"}, "weights": {"gradient-inversion"}}),
        (
            "cwt-replay",
            GENERATOR,
            {
                "codes": {"decoding", "copies", "nearest-synthetic"},
                "generator": {"copies", "near-copies", "nearest-synthetic", "projection"},
                "weights": {"gradient-inversion", *MEMBERSHIP},
            },
        ),
        (
            "fedavg-replay",
            {**GENERATOR, "replay.codes": "as-trained"},
            {
                "codes": {"decoding", "copies", "nearest-synthetic"},
                "generator": {"copies", "near-copies", "nearest-synthetic", "projection"},
                "weights": {"gradient-inversion", *MEMBERSHIP},
            },
        ),
    ],
)
def test_every_kind_is_attacked_with_what_fits_it(audited, method, changes, attacks):
    report, folder = audited(method, changes)
    done: dict[str, set[str]] = {}
    for parcel in [one for one in report["parcels"] if one["operation"] != "released model"]:
        done.setdefault(parcel["kind"], set()).update(finding["attack"] for finding in parcel["findings"])
        for finding in parcel["findings"]:
            assert finding["threat_model"]
            if method in DRAWN:
                assert (folder / finding["picture"]).stat().st_size > 1000
                assert finding["picture"].startswith(f"sites/{parcel['site']}/audit/")
    assert done.pop("metrics", set()) <= {"score-histograms"}  # test_audit_of_sums.py has more images
    assert done == attacks
    for kind in attacks:
        assert report["verdicts"][kind]["words"]


def test_the_report_is_what_is_written(tiny, undisturbed, tmp_path):
    shutil.copytree(undisturbed(tiny("fedsgd", SMALL, rounds=1)).folder, tmp_path / "run")
    report = audit(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "audit.json").read_text()) == report


def test_what_a_secure_sum_shows_is_attacked_and_nothing_else(audited):
    report, _ = audited("fedavg", {"federation.sum": "secure", "sites.count": 3})
    assert {(parcel["kind"], parcel["site"]) for parcel in report["parcels"]} == {("masked", "sum of 3 sites")}
    assert "weights" not in report["verdicts"]
    assert report["verdicts"]["masked"]["attacked"] >= 1
    assert report["verdicts"]["shares"]["verdict"] == "not tested"


@pytest.mark.parametrize(
    ("generator", "changes"),
    [
        ("dcgan", {"generator.steps": 2, "generator.width": 2, "generator.latent": 4}),
        ("stylegan2", {"generator.steps": 1, "generator.width": 4, "generator.latent": 8}),
    ],
)
@pytest.mark.slow
def test_generators_of_every_kind_are_projected_into(audited, generator, changes):
    table = {"generator.name": generator, "generator.batch_size": 8, **changes}
    replay = {"replay.codes": "prior", "replay.probe": False, "replay.samples": 8}
    report, _ = audited("fedavg-replay", {**table, **replay})
    (parcel,) = [one for one in report["parcels"] if one["kind"] == "generator"]
    assert [one["attack"] for one in parcel["findings"]] == ["copies", "nearest-synthetic", "projection", "near-copies"]
    said = parcel["findings"][2]["threat_model"]
    assert ("the labels of those that it asks about" in said) == (generator == "dcgan")  # StyleGAN2's styles have none


def test_labels_of_candidates_that_are_not_granted_are_guessed(audited):
    table = {"generator.name": "dcgan", "generator.steps": 2, "generator.width": 2, "generator.latent": 4}
    replay = {"generator.batch_size": 8, "replay.codes": "prior", "replay.probe": False, "replay.samples": 8}
    granted = [c for c in Audit().threat_model if c != Capability.CANDIDATE_LABELS]
    report, _ = audited("fedavg-replay", {**table, **replay, "audit.threat_model": granted})
    (parcel,) = [one for one in report["parcels"] if one["kind"] == "generator"]
    assert any("label is guessed" in found["threat_model"] for found in parcel["findings"])
    (weights,) = [one for one in report["parcels"] if one["kind"] == "weights"]
    refused = {"attack": "loss-threshold", "why": "the threat model does not grant candidate-labels"}
    assert {**refused, "question": "membership", "excluded": True} in weights["not_tried"]


def test_sealed_parcels_are_audited_at_their_sender(audited):
    table = {"generator.name": "dcgan", "generator.steps": 2, "generator.width": 2, "generator.latent": 4}
    report, folder = audited("feder", {**table, "generator.batch_size": 8, "tuning.on": False}, buffer=24, rounds=2)
    parcels = [one for one in report["parcels"] if one["kind"] != "metrics"]
    done = {one["kind"]: {found["attack"] for found in one["findings"]} for one in parcels}
    assert done == {"weights": MEMBERSHIP, "synthetic-images": {"copies", "near-copies", "nearest-synthetic"}}
    assert {one["round"] for one in parcels} == {2}  # the last ones: the longer it learns, the more it tells
    lines = [json.loads(line) for line in (folder / "ledger" / "site-1.jsonl").read_text().splitlines()]
    assert any(line["to"] == "site-2" for line in lines if line["operation"] == "hand_over")


def test_latents_of_a_shallow_cut_leak_and_labels_are_named(tiny, undisturbed, tmp_path, monkeypatch):
    more = dataclasses.replace(audit_settings.EFFORTS["quick"], latent_steps=250)
    monkeypatch.setitem(audit_settings.EFFORTS, "quick", more)
    done = undisturbed(tiny("fedreplay", {**SMALL, "audit.own_images": "none"}, rounds=1))  # no decoder
    shutil.copytree(done.folder, tmp_path / "run")
    report = audit(tmp_path / "run", kinds=["latents"])
    assert report["verdicts"]["latents"]["verdict"] == "leaks"
    assert report["verdicts"]["labels"]["verdict"] == "leaks"
    assert report["verdicts"]["weights"]["verdict"] == "not tested"
    assert report["verdicts"]["metrics"]["verdict"] == "not tested"


def test_real_images_need_no_attack(audited):
    report, _ = audited("fedavg-share")
    assert report["verdicts"]["real-images"] == {
        "left": 2, "verdict": "leaks", "words": "real images left the site as they are (2 times)", "not_tried": [],
    }  # fmt: skip


def test_every_telling_kind_has_an_attack():
    assert {kind for attack in ATTACKS.values() for kind in attack.kinds} == {*ATTACKABLE_KINDS, *SUM_KINDS}


# --- the ledger ---------------------------------------------------------------------------------------


def test_a_parcel_that_is_not_what_left_is_refused(audited):
    _, folder = audited("fedavg")
    file = next(folder.glob("sites/site-1/kept/*/0-weights.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(WorkFailed, match=r"site-1.*is not what its ledger says left"):
        audit(folder)


def test_a_broken_chain_is_refused(audited):
    _, folder = audited("fedavg")
    ledger = folder / "ledger" / "site-2.jsonl"
    ledger.write_text(ledger.read_text().replace('"bytes": ', '"bytes": 1'))
    with pytest.raises(WorkFailed, match="chain is broken"):
        audit(folder)


def test_a_run_that_kept_nothing_gets_one_sentence(tiny, undisturbed):
    done = undisturbed(tiny("fedavg", {"sites.count": 2}, rounds=1))
    with pytest.raises(BadInput, match=r"kept no parcels to attack; .* --set audit.keep_parcels=1$"):
        audit(done.folder)


def test_what_is_no_run_folder_is_said(tmp_path):
    with pytest.raises(BadInput, match="is not a run folder"):
        audit(tmp_path)


@pytest.mark.parametrize(("name", "value"), [("kinds", "weihgts"), ("sites", "site-9")])
def test_misspelt_names_are_said(tiny, undisturbed, name, value):
    done = undisturbed(tiny("fedavg", SMALL, rounds=1))
    with pytest.raises(BadInput, match=f"--{name}: no such choice: '{value}' .did you mean"):
        audit(done.folder, **{name: [value]})


# --- the honest attacker ------------------------------------------------------------------------------


def test_what_the_threat_model_withholds_is_not_tried(audited):
    granted = [c for c in Audit().threat_model if c not in (Capability.WEIGHTS, Capability.CLASSIFIER)]
    report, _ = audited("fedavg", {"audit.threat_model": granted})
    assert report["parcels"][0]["findings"] == []
    whys = {one["attack"]: one["why"] for one in report["parcels"][0]["not_tried"]}
    assert whys == {
        "gradient-inversion": "the threat model does not grant weights",
        "loss-threshold": "the threat model does not grant classifier",
        "shadow-models": "the threat model does not grant classifier",
        "site-inference": "the threat model does not grant classifier, weights",
    }
    assert report["verdicts"]["weights"]["verdict"] == "not tested"


def seen_and_truth(tiny, undisturbed, changes=None):
    study = tiny("fedavg", {**SMALL, "optimizer.batch_size": 2, **(changes or {})}, rounds=1, local_steps=2)
    folder = undisturbed(study).folder
    assembly = Assembly(study, prepare(study.data, study.sites), folder)
    tools = Tools(assembly, study.audit.threat, audit_settings.EFFORTS["quick"], Pixels(), 0, "cpu")
    (release,) = [one for one in releases(folder / "sites" / "site-1" / "kept") if "weights" in one.kinds]
    data = open_site(assembly.prepared.folder, "site-1")
    return Seen.of("site-1", release, 0, tools), release, data


def shuffled(data: SiteData) -> SiteData:
    order = np.random.default_rng(1).permutation(len(data.train))
    part = dataclasses.replace(data.train, images=255 - data.train.images[order], labels=data.train.labels[order])
    return dataclasses.replace(data, train=part)


def test_the_truth_enters_the_scoring_alone(tiny, undisturbed):
    seen, release, data = seen_and_truth(tiny, undisturbed)
    found = [attack_updates.invert_gradients(seen, Truth(release.used, some, 0)) for some in (data, shuffled(data))]
    first, second = (one.draw.__self__ for one in found if isinstance(one, Finding))
    assert torch.equal(first.found, second.found)
    assert not torch.equal(first.truth, second.truth)
    assert found[0].assumed[0] == "the update was made as it was: 4 images in 2 steps"


def test_known_labels_are_used_only_where_granted(tiny, undisturbed):
    granted = [*Audit().threat_model, Capability.LABELS]
    seen, release, data = seen_and_truth(tiny, undisturbed, {"audit.threat_model": granted})
    plan = attack_updates.AttackPlan(seen)
    truth = Truth(release.used, data, 0)
    assert plan.settings().label == "known"
    assert plan.knowledge(truth).labels.tolist() == [truth.labels(torch.cat(release.used)).tolist()]
    blind, _, _ = seen_and_truth(tiny, undisturbed)
    assert attack_updates.AttackPlan(blind).knowledge(truth).labels is None


def test_masks_are_searched_for_or_known(tiny, undisturbed):
    for granted, label in (((), "joint"), ((Capability.LABELS,), "known")):
        changes = {**MASKS, "audit.threat_model": [*Audit().threat_model, *granted]}
        seen, release, data = seen_and_truth(tiny, undisturbed, changes)
        plan, truth = attack_updates.AttackPlan(seen), Truth(release.used, data, 0)
        known = plan.knowledge(truth)
        assert (plan.settings().label, known.label_form, known.label_shape) == (label, "masks", (1, 28, 28))
        if granted:
            masks = torch.from_numpy(np.array(data.train.masks))[torch.cat(release.used)]
            assert torch.equal(known.labels, masks[None, :, None].float())


def test_the_front_of_a_turn_of_one_step_is_attacked_as_it_was_moved(tiny, undisturbed, tmp_path):
    changes = {**SMALL, "model.backbone": "small-cnn", "optimizer.batch_size": 2, "optimizer.momentum": 0.0}
    for steps, said in ((1, "the turn was one step on 2 images"), (2, "a turn of 2 steps is taken for one on 2")):
        done = undisturbed(tiny("splitnn", changes, rounds=1, local_steps=steps))
        shutil.copytree(done.folder, tmp_path / str(steps))
        report = audit(tmp_path / str(steps), kinds=["weights"])
        (found,) = report["parcels"][0]["findings"]
        assert found["assumed"][0].startswith(said)
        gaps = {gap["attack"]: gap["why"] for gap in report["parcels"][0]["not_tried"]}
        parts = ("loss-threshold", "shadow-models", "site-inference")
        assert gaps == dict.fromkeys(parts, "only a part of the network was sent")


def test_large_updates_are_taken_for_one_step_and_that_is_said(audited):
    report, _ = audited("fedavg")
    assumed, start = report["parcels"][0]["findings"][0]["assumed"]
    assert assumed.endswith("are taken for one step on 4")
    assert start.startswith("the search starts at the mean of the attacker's own images")


def test_progress_is_told_and_a_report_grows(tiny, undisturbed, tmp_path):
    done = undisturbed(tiny("splitnn", {**SMALL, "model.backbone": "small-cnn"}, rounds=1))
    shutil.copytree(done.folder, tmp_path / "run")
    told = []

    def stop_at_the_second(what: str, count: int, total: int) -> None:
        told.append((count, total))
        if count == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit(tmp_path / "run", kinds=["activations", "weights"], progress=stop_at_the_second)
    assert told == [(0, 2), (1, 2)]
    report = json.loads((tmp_path / "run" / "audit.json").read_text())
    assert (len(report["parcels"]), report["complete"]) == (1, False)


def test_a_trajectory_is_kept_and_drawn(tiny, undisturbed, tmp_path):
    """Steps beyond the search are left out and its last one is added; the picture stays in the site's folder."""
    done = undisturbed(tiny("fedavg", {**SMALL, "optimizer.batch_size": 2}, rounds=1, local_steps=1))
    folder = tmp_path / "run"
    shutil.copytree(done.folder, folder)
    report = audit(folder, kinds=["weights"], trajectory=(0, 2, 999_999))
    assert_valid(folder)
    inversion, membership, *_ = report["parcels"][0]["findings"]
    kept = inversion["trajectory"]
    assert kept["steps"] == [0, 2, 3]
    assert len(kept["loss"]) == len(kept["distance"]) == 3
    assert kept["loss"][0] > kept["distance"][0] > 0  # the loss has the weight of roughness, too
    assert (folder / kept["picture"]).is_file()
    assert kept["picture"].startswith("sites/site-1/audit/")
    assert kept["picture"] in report["verdicts"]["weights"]["pictures"]
    assert "trajectory" not in membership
    with pytest.raises(BadInput, match="--trajectory: give steps in ascending order"):
        audit(folder, trajectory=(5, 2))


def test_a_study_may_ask_for_a_trajectory(audited):
    attack = {"optimizer": "adam", "iterations": 3, "label": "joint", "trajectory": [0, 1]}
    report, _ = audited("fedsgd", {"audit.gradient_inversion": attack, "optimizer.batch_size": 1}, batch="mini")
    found = report["parcels"][0]["findings"][0]
    assert found["trajectory"]["steps"] == [0, 1]
    assert 0.01 < found["evidence"]["mse_of_start"] < 0.5  # of noise between 0 and 1
    assert found["evidence"]["non_converging"] in (0, 1)


def test_latents_without_the_encoder(audited, hurry):
    """Where the encoder is not granted but similar images are, a decoder is trained that does not know it."""
    hurry(latent_steps=2, candidates=8)
    granted = [one for one in Audit().threat_model if one != Capability.ARCHITECTURE]
    report, _ = audited("fedreplay", {"audit.threat_model": [*granted, Capability.SIMILAR_IMAGES]})
    (latents,) = (parcel for parcel in report["parcels"] if parcel["kind"] == "latents")
    assert [found["attack"] for found in latents["findings"]] == ["surrogate-decoder"]
    assert latents["not_tried"][0]["why"] == "the threat model does not grant architecture"
    assert latents["findings"][0]["assumed"][0].startswith("the encoder is not known")


def test_a_study_names_the_attack_on_its_gradients(audited, monkeypatch):
    """DLG as its paper has it: L-BFGS on images and labels together, on the papers' LeNet."""
    used: list[GradientInversion] = []
    search = GradientInversion.run
    monkeypatch.setattr(GradientInversion, "run", lambda self, *a, **k: used.append(self) or search(self, *a, **k))
    attack = {"optimizer": "lbfgs", "iterations": 2, "start": "uniform", "label": "joint", "returns": "last"}
    changes = {
        "model.backbone": "polyclinic.attacks.gradient_inversion.networks:lenet_of_the_papers",
        "optimizer.batch_size": 1,
        "audit.gradient_inversion": attack,
    }
    report, _ = audited("fedsgd", changes, batch="mini")
    assert used[0] == GradientInversion(**attack)
    (found,) = [one for parcel in report["parcels"] for one in parcel["findings"]]
    assert "labels are searched for together with the images" in found["threat_model"]
