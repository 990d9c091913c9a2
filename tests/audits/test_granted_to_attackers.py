"""What an attacker of an audit is given, how that is said, and what is kept of a search."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from json_schemas import assert_valid
from small_audits import MASKS, SMALL, what_was_kept

from polyclinic.attacks.attack import Capability
from polyclinic.attacks.gradient_inversion.settings import GradientInversion
from polyclinic.audits import attack_updates
from polyclinic.audits.attack import Finding, Seen
from polyclinic.audits.audit import audit
from polyclinic.audits.truth import Truth
from polyclinic.data.parts import SiteData
from polyclinic.errors import BadInput
from polyclinic.study.tables import Audit

pytestmark = pytest.mark.usefixtures("hurried")


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
    tools, ((release,), _) = what_was_kept(study, undisturbed(study).folder)
    return Seen.of("site-1", release, 0, tools), release, tools.site_data("site-1")


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


@pytest.mark.slow
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
        assert bool(gaps.pop("recomputation", "")) == (steps == 2)  # of two gradients at the cut the first is not kept
        parts = ("loss-threshold", "shadow-models", "site-inference")
        assert gaps == dict.fromkeys(parts, "only a part of the network was sent")


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
