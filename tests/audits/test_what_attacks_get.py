"""What an audit hands to its attacks and to the scoring: the right weights, images and settings, and no more."""

import dataclasses
import shutil

import pytest
import torch
from small_audits import what_was_kept

from polyclinic.attacks.attack import Capability
from polyclinic.attacks.copies import find_copies
from polyclinic.attacks.gradient_inversion.networks import prepare_for_attack
from polyclinic.attacks.gradient_inversion.objective import Simulation
from polyclinic.audits import attack_generators as attack_synthetic
from polyclinic.audits import attack_latents, attack_membership, attack_updates
from polyclinic.audits.attack import Finding, NotTried, Seen, Tools
from polyclinic.audits.audit import audit, without_unread
from polyclinic.audits.parcels import AuditedParcel
from polyclinic.audits.plots import histograms
from polyclinic.audits.truth import Truth
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


def test_later_rounds_are_attacked_from_the_weights_that_were_sent(opened):
    tools, (kept, _) = opened("fedavg", {"optimizer.decay_every": 1, "optimizer.decay": 0.5}, rounds=2, local_steps=1)
    seen, truth = of_site(tools, kept[-1])
    sent = kept[-1].received("weights")
    weights = seen.network.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in sent.items())
    assert not torch.equal(weights["conv1.weight"], tools.assembly.initial_weights()["conv1.weight"])
    study = tools.assembly.study
    assert (
        attack_updates.AttackPlan(seen).knowledge(truth).training.lr
        == study.optimizer.lr_in(2)
        == study.optimizer.lr / 2
    )


def explained(tools: Tools, release: Release) -> float:
    """The share of an update that its own images do not explain, simulated as the audit does it."""
    seen, truth = of_site(tools, release)
    plan = attack_updates.AttackPlan(seen)
    assert plan.exact
    known = plan.knowledge(truth)
    simulation = Simulation(prepare_for_attack(known.model), names=list(seen.parcel.tensors), training=known.training)
    index = torch.cat(truth.batches)
    classes = torch.nn.functional.one_hot(truth.labels(index).long(), known.classes).float()
    observed, sent = simulation.observe(seen.parcel.tensors), simulation(truth.images(index), classes)
    rest = sum((observed[name] - sent[name]).square().sum() for name in simulation.names)
    return float(rest / sum(tensor.square().sum() for tensor in observed.values()))


@pytest.mark.parametrize(
    ("method", "changes", "more"),
    [
        ("fedavg", {"optimizer.momentum": 0.9, "optimizer.weight_decay": 0.1}, {}),
        ("fedprox", {"optimizer.momentum": 0.0}, {"mu": 20.0}),
    ],
)
def test_an_update_taken_as_it_was_made_is_explained_by_its_images(opened, method, changes, more):
    tools, (kept, _) = opened(method, changes, local_steps=2, **more)
    assert explained(tools, kept[0]) < 1e-6


def test_momentum_that_a_site_kept_is_not_known(opened):
    changes = {"optimizer.keep_state": True, "optimizer.momentum": 0.9}
    tools, (kept, _) = opened("fedavg", changes, rounds=2, local_steps=1)
    first, last = (attack_updates.AttackPlan(of_site(tools, release)[0]) for release in kept)
    assert first.exact
    assert not last.exact
    assert last.assumed[0].endswith("(without the momentum that the site kept)")


def test_a_sum_is_scored_with_every_sites_own_images(opened):
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


def test_a_sum_of_gradients_is_over_every_sites_batch(opened):
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


@pytest.mark.parametrize(
    ("method", "changes", "attack", "of_kind", "capability"),
    [
        ("fedreplay", {}, attack_latents.LatentInversionAttack().attack, "latents", Capability.LATENTS),
        ("fedreplay", {}, attack_latents.LatentInversionAttack().attack, "latents", Capability.BATCH_NORM_STATISTICS),
        ("cwt-replay", VQVAE2, attack_synthetic.DecodingAttack().attack, "codes", Capability.GENERATOR),
        ("fedavg-replay", DCGAN, attack_synthetic.GeneratorAttack().attack, "generator", Capability.GENERATOR),
        ("fedavg-replay", DCGAN, attack_synthetic.GeneratorAttack().attack, "generator", Capability.SYNTHETIC_IMAGES),
    ],
)
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


@pytest.mark.parametrize("channels", [1, 3])
def test_copies_are_shown_beside_what_they_copy(tmp_path, channels):
    rng = torch.Generator().manual_seed(3)
    training, held_out, others = (torch.rand(75, channels, 10, 10, generator=rng) * 255).byte().split(25)
    others = others.clone()
    others[4], others[9] = training[7].flip(-1), training[2]
    found = find_copies(others, training, held_out)
    near = found.training
    which = near.distance.argsort()[:2]
    assert set(near.index[which].tolist()) == {7, 2}
    turns = near.orientation[which]
    pairs = attack_synthetic.beside(others[which], training[near.index[which]], ["0.1", "0.2"], turns)
    mirrored = next(n for n, words in enumerate(pairs.captions) if words.endswith("mirrored"))
    assert torch.equal(pairs.rows["made"][mirrored], training[7].flip(-1))
    assert torch.equal(pairs.rows["training"][mirrored], training[7])
    histograms("distance", {"made": found.training.distance}, pairs=pairs)(tmp_path / "pairs.png")
    histograms("distance", {"made": found.training.distance})(tmp_path / "alone.png")
    assert (tmp_path / "pairs.png").stat().st_size > (tmp_path / "alone.png").stat().st_size


def test_features_that_were_asked_for_are_told_of_reconstructions(tiny, undisturbed, tmp_path, monkeypatch):
    monkeypatch.setitem(audit_settings.EFFORTS, "quick", FEW)
    done = undisturbed(tiny("fedreplay", KEPT, rounds=1))
    shutil.copytree(done.folder, tmp_path / "run")
    report = audit(tmp_path / "run", kinds=["latents"], features="efficientnet-lite0")
    found = report["parcels"][0]["findings"][0]
    assert report["features"] == found["evidence"]["features"] == "EffLite0"
    assert found["evidence"]["distance"] > 0
    assert found["evidence"]["distance_of_guess"] > 0
