"""What an audit hands to its attacks and to the scoring, how that is said, and what is kept of a search."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from json_schemas import assert_valid
from small_audits import SMALL, what_was_kept

from polyclinic.attacks.attack import Capability
from polyclinic.attacks.gradient_inversion.settings import GradientInversion
from polyclinic.audits import attack_generators as attack_synthetic
from polyclinic.audits import attack_latents, attack_membership, attack_updates
from polyclinic.audits.attack import Finding, NotTried, Seen, Tools
from polyclinic.audits.audit import audit, without_unread
from polyclinic.audits.parcels import AuditedParcel
from polyclinic.audits.truth import Truth
from polyclinic.data.parts import SiteData
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.archive import Release
from polyclinic.study import tables as audit_settings
from polyclinic.study.tables import Audit, Effort

KEPT = {"audit.keep_parcels": 0, "sites.count": 2, "data.test": 0.4, "optimizer.batch_size": 2}
FEW = Effort(
    sites=1, releases=1, images=4, update_steps=1, latent_steps=1, projected=4, projection_steps=1, candidates=20
)
DCGAN = {
    "generator.name": "dcgan", "generator.steps": 2, "generator.width": 2, "generator.latent": 4,
    "generator.batch_size": 8, "replay.codes": "prior", "replay.probe": False, "replay.samples": 8,
}  # fmt: skip
VQVAE2 = {
    "generator.name": "vqvae2", "generator.epochs": 1, "generator.prior_epochs": 0, "generator.width": 8,
    "generator.top_codes": 8, "generator.bottom_codes": 8, "replay.probe": False,
}  # fmt: skip


@pytest.fixture
def opened(tiny, undisturbed):
    """`opened("fedavg", {}, rounds=2)`: the tools of an audit of such a run, and what site-1 and site-2 kept."""

    def open_run(method: str, changes: dict | None = None, **method_settings) -> tuple[Tools, list[list[Release]]]:
        study = tiny(method, {**KEPT, **(changes or {})}, **{"rounds": 1, **method_settings})
        return what_was_kept(study, undisturbed(study).folder, FEW)

    return open_run


def of_site(tools: Tools, release: Release, number: int = 0) -> tuple[Seen, Truth]:
    return Seen.of("site-1", release, number, tools), Truth(release.used, tools.site_data("site-1"), 0)


def withheld(capability: Capability) -> dict[str, list[Capability]]:
    return {"audit.threat_model": [one for one in Audit().threat_model if one != capability]}


def test_later_rounds_are_attacked_from_the_weights_sent_without_the_momentum_kept(opened):
    tools, (kept, _) = opened("fedavg", {"optimizer.decay_every": 1, "optimizer.decay": 0.5}, rounds=2, local_steps=1)
    seen, truth = of_site(tools, kept[-1])
    sent = kept[-1].received("weights")
    weights = seen.network.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in sent.items())
    assert not torch.equal(weights["conv1.weight"], tools.assembly.initial_weights()["conv1.weight"])
    study = tools.assembly.study
    known = attack_updates.AttackPlan(seen).knowledge(truth)
    assert known.training.lr == study.optimizer.lr_in(2) == study.optimizer.lr / 2
    changes = {"optimizer.keep_state": True, "optimizer.momentum": 0.9}
    tools, (kept, _) = opened("fedavg", changes, rounds=2, local_steps=1)
    first, last = (attack_updates.AttackPlan(of_site(tools, release)[0]) for release in kept)
    assert first.exact
    assert not last.exact
    assert last.assumed[0].endswith("(without the momentum that the site kept)")


def test_a_sum_is_of_every_sites_images_and_batch(opened):
    tools, (first, second) = opened("fedavg", {"audit.secure_sum": True}, local_steps=1)
    target = AuditedParcel({"site-1": first[0], "site-2": second[0]}, 0)
    seen, truth = target.seen(tools), target.truth(tools)
    parts = [
        Truth(release.used, tools.site_data(site), 0) for site, release in (("site-1", first[0]), ("site-2", second[0]))
    ]
    expected = torch.cat([part.images(part.used) for part in parts])
    assert torch.equal(truth.images(truth.used), expected)
    assert int((truth.used < truth.own).sum()) == len(parts[0].used)
    assert not attack_updates.AttackPlan(seen).exact  # two sites' steps are no steps after each other
    tools, (first, second) = opened("fedsgd", {"audit.secure_sum": True}, batch="mini")
    alone, _ = of_site(tools, first[0])
    summed = AuditedParcel({"site-1": first[0], "site-2": second[0]}, 0).seen(tools)
    assert (attack_updates.AttackPlan(alone).images, attack_updates.AttackPlan(summed).images) == (2, 4)
    assert attack_updates.AttackPlan(summed).exact


def test_membership_is_asked_of_the_model_that_left(opened):
    tools, (kept, _) = opened("fedavg")
    seen, truth = of_site(tools, kept[0])
    images, labels = truth.members(6)
    found = attack_membership.losses_of(seen, attack_membership.sent_model(seen))(images.float() / 255, labels)
    model = tools.assembly.build_model()
    model.load_state_dict({**tools.assembly.initial_weights(), **seen.parcel.tensors})
    expected = torch.nn.functional.cross_entropy(model.eval()(images.float() / 255), labels.long(), reduction="none")
    torch.testing.assert_close(found, expected)


def test_another_truth_changes_no_image_that_latents_or_codes_give_back(opened):
    for method, changes, attack, kind in (
        ("fedreplay", {}, attack_latents.LatentInversionAttack().attack, "latents"),
        ("cwt-replay", VQVAE2, attack_synthetic.DecodingAttack().attack, "codes"),
    ):
        tools, (kept, _) = opened(method, changes)
        release = next(one for one in kept if kind in one.kinds)
        seen, truth = of_site(tools, release, release.kinds.index(kind))
        part = dataclasses.replace(truth.data.train, images=255 - truth.data.train.images[::-1])
        other = Truth(release.used, dataclasses.replace(truth.data, train=part), 0)
        first, second = (attack(seen, one)[0].draw.__self__ for one in (truth, other))
        assert torch.equal(first.found, second.found)
        assert not torch.equal(first.truth, second.truth)


def test_codes_that_came_with_labels_of_other_sites_are_decoded(opened):
    """In turns a site hands on labels of those before it; their codes are no images of its own."""
    tools, (_, kept) = opened("cwt-replay", VQVAE2)
    coded = [one for one in kept if "codes" in one.kinds]
    release = next(one for one in coded if set(one.parcel("labels").tensors) == {"site-1", "site-2"})
    seen, _ = without_unread(Seen.of("site-2", release, release.kinds.index("codes"), tools))
    _, codes = attack_synthetic.own_codes(seen)
    assert len(codes["top"]) == len(tools.site_data("site-2").train)


def test_activations_of_a_batch_are_inverted_in_training_mode_and_scored_with_that_batch(opened):
    tools, (kept, _) = opened("splitnn", {"model.backbone": "small-cnn"}, local_steps=2)
    release = [one for one in kept if one.operation == "forward"][-1]
    seen, truth = of_site(tools, release)
    (found,) = attack_latents.LatentInversionAttack().attack(seen, truth)
    assert isinstance(found, Finding)
    assert "training mode" in found.threat_model
    shown = found.draw.__self__
    assert torch.equal(shown.truth, truth.images(release.used[0]))
    assert found.assumed == ["the encoder (up to conv1) is the one of the beginning of the turn, 1 step ago"]


@pytest.mark.parametrize(("method", "changes", "attack", "of_kind", "capability"), [
    ("fedreplay", {}, attack_latents.LatentInversionAttack().attack, "latents", Capability.LATENTS),
    ("fedreplay", {}, attack_latents.LatentInversionAttack().attack, "latents", Capability.BATCH_NORM_STATISTICS),
    ("cwt-replay", VQVAE2, attack_synthetic.DecodingAttack().attack, "codes", Capability.GENERATOR),
    ("fedavg-replay", DCGAN, attack_synthetic.GeneratorAttack().attack, "generator", Capability.GENERATOR),
    ("fedavg-replay", DCGAN, attack_synthetic.GeneratorAttack().attack, "generator", Capability.SYNTHETIC_IMAGES),
])  # fmt: skip
def test_what_is_withheld_is_not_used(opened, method, changes, attack, of_kind, capability):
    tools, (kept, _) = opened(method, {**changes, **withheld(capability)})
    release = next(one for one in kept if of_kind in one.kinds)
    results = attack(*of_site(tools, release, release.kinds.index(of_kind)))
    refused = [one for one in results if isinstance(one, NotTried)]
    assert refused
    assert all(one.why == f"the threat model does not grant {capability}" for one in refused)
    tried = {one.attack for one in results if isinstance(one, Finding)}
    expected = {
        (of_kind, Capability.GENERATOR): {"copies", "nearest-synthetic"} if of_kind == "generator" else set(),
        (of_kind, Capability.SYNTHETIC_IMAGES): {"projection"},
        (of_kind, Capability.BATCH_NORM_STATISTICS): {"surrogate-decoder"},  # which needs no statistics
    }
    assert tried == expected.get((of_kind, capability), set())


def test_features_that_were_asked_for_are_told_of_reconstructions(tiny, undisturbed, tmp_path, monkeypatch):
    monkeypatch.setitem(audit_settings.EFFORTS, "quick", FEW)
    done = undisturbed(tiny("fedreplay", KEPT, rounds=1))
    shutil.copytree(done.folder, tmp_path / "run")
    report = audit(tmp_path / "run", kinds=["latents"], features="efficientnet-lite0")
    found = report["parcels"][0]["findings"][0]
    assert report["features"] == found["evidence"]["features"] == "EffLite0"
    assert found["evidence"]["distance"] > 0
    assert found["evidence"]["distance_of_guess"] > 0


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
    }  # fmt: skip
    assert report["verdicts"]["weights"]["verdict"] == "not tested"


def seen_and_truth(tiny, undisturbed, changes=None):
    study = tiny("fedavg", {**SMALL, "optimizer.batch_size": 2, **(changes or {})}, rounds=1, local_steps=2)
    tools, ((release,), _) = what_was_kept(study, undisturbed(study).folder)
    return Seen.of("site-1", release, 0, tools), release, tools.site_data("site-1")


def shuffled(data: SiteData) -> SiteData:
    order = np.random.default_rng(1).permutation(len(data.train))
    part = dataclasses.replace(data.train, images=255 - data.train.images[order], labels=data.train.labels[order])
    return dataclasses.replace(data, train=part)


def test_the_truth_enters_the_scoring_alone_and_known_labels_only_where_granted(tiny, undisturbed):
    seen, release, data = seen_and_truth(tiny, undisturbed)
    found = [attack_updates.invert_gradients(seen, Truth(release.used, some, 0)) for some in (data, shuffled(data))]
    first, second = (one.draw.__self__ for one in found if isinstance(one, Finding))
    assert torch.equal(first.found, second.found)
    assert not torch.equal(first.truth, second.truth)
    assert found[0].assumed[0] == "the update was made as it was: 4 images in 2 steps"
    granted = [*Audit().threat_model, Capability.LABELS]
    seen, release, data = seen_and_truth(tiny, undisturbed, {"audit.threat_model": granted})
    plan = attack_updates.AttackPlan(seen)
    truth = Truth(release.used, data, 0)
    assert plan.settings().label == "known"
    assert plan.knowledge(truth).labels.tolist() == [truth.labels(torch.cat(release.used)).tolist()]
    blind, _, _ = seen_and_truth(tiny, undisturbed)
    assert attack_updates.AttackPlan(blind).knowledge(truth).labels is None


def test_the_front_of_a_turn_of_one_step_is_attacked_as_it_was_moved(tiny, undisturbed, tmp_path, hurried):
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


def test_progress_is_told_and_a_report_grows(tiny, undisturbed, tmp_path, hurried):
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


def test_a_trajectory_is_kept_and_drawn(tiny, undisturbed, tmp_path, hurried):
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
    """DLG as its paper has it: L-BFGS on images and labels together, on the papers' LeNet; steps may be kept."""
    used: list[GradientInversion] = []
    search = GradientInversion.run
    monkeypatch.setattr(GradientInversion, "run", lambda self, *a, **k: used.append(self) or search(self, *a, **k))
    attack = {"optimizer": "lbfgs", "iterations": 2, "start": "uniform", "label": "joint", "returns": "last"}
    attack["trajectory"] = [0, 1]
    network = "polyclinic.attacks.gradient_inversion.networks:lenet_of_the_papers"
    changes = {"model.backbone": network, "optimizer.batch_size": 1, "audit.gradient_inversion": attack}
    report, _ = audited("fedsgd", changes, batch="mini")
    assert used[0] == GradientInversion(**attack)
    (found,) = [one for parcel in report["parcels"] for one in parcel["findings"]]
    assert "labels are searched for together with the images" in found["threat_model"]
    assert found["trajectory"]["steps"] == [0, 1]
    assert 0.01 < found["evidence"]["mse_of_start"] < 0.5  # of noise between 0 and 1
    assert found["evidence"]["non_converging"] in (0, 1)
