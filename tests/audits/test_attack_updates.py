"""Updates: priors, simulated training, first layers, planted ones, and those of others."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from small_audits import first_view, what_was_kept
from torch import nn

from polyclinic.attacks.attack import Capability, Verdict
from polyclinic.attacks.gradient_inversion.networks import prepare_for_attack
from polyclinic.attacks.gradient_inversion.objective import LocalTraining, Simulation
from polyclinic.audits import attack_updates
from polyclinic.audits.attack import EVERY_QUESTION, Finding, NotTried, Seen
from polyclinic.audits.attack_membership import WEAKEST, sent_model, weakest_between
from polyclinic.audits.attack_site import SiteInferenceAttack
from polyclinic.audits.attack_updates import (
    BATCH_NORM_PRIOR,
    AttackPlan,
    GradientInversionAttack,
    with_priors,
    with_start,
)
from polyclinic.audits.audit import audit, unread_names, without_unread
from polyclinic.audits.external import distances, doubt_about, plant
from polyclinic.audits.external_files import ImageFolder, Update, UpdateSettings
from polyclinic.audits.planting import planted_update
from polyclinic.audits.run_inversion import is_front, loss_with_gradients, unfinished
from polyclinic.audits.truth import Truth
from polyclinic.audits.verdicts import with_doubt
from polyclinic.data.parts import ImageSet
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.archive import Release
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.models import BACKBONES, split
from polyclinic.models.backbone import Backbone
from polyclinic.randomness import torch_rng
from polyclinic.study.tables import Audit

STUDY = {"audit.keep_parcels": 0, "sites.count": 2, "data.test": 0.5, "optimizer.momentum": 0.0}


@pytest.fixture
def sent(tiny, undisturbed, hurry):
    """`sent(changes, rounds=2)`: the first gradients of site-1 as their receiver sees them, and what is true."""
    hurry(images=8, releases=2)

    def of_run(changes: dict, **method) -> tuple[Seen, Truth]:
        return first_view(undisturbed(tiny("fedsgd", {**STUDY, **changes}, **method)).folder, "gradients", ("site-1",))

    return of_run


def test_statistics_that_left_are_those_of_the_batch_of_a_planted_update_too(sent):
    seen, truth = sent({"model.backbone": "small-cnn", "optimizer.batch_size": 4}, rounds=1, batch="mini")
    plan = AttackPlan(seen)
    search = with_priors(plan, with_start(plan, truth))
    assert search.settings.batch_norm_prior == BATCH_NORM_PRIOR
    assert "batch-norm statistics" in search.assumed[-1]
    knowledge = search.knowledge
    used = truth.images(torch.cat(truth.batches))
    assert float(knowledge.batch_norm_prior(used[None])) < 0.02
    assert float(knowledge.batch_norm_prior(torch.rand_like(used)[None])) > 1
    seen, truth = sent({"model.backbone": "small-cnn", "optimizer.batch_size": 4}, rounds=1, batch="mini")
    (planted,) = planted_update(seen, truth)
    real, made = seen.companion("statistics"), planted.seen.companion("statistics")
    assert made.tensors.keys() == real.tensors.keys()
    assert made.digest != real.digest
    plan = AttackPlan(planted.seen)
    knowledge = with_priors(plan, with_start(plan, planted.truth)).knowledge
    images = planted.truth.images(torch.cat(planted.truth.batches))
    assert float(knowledge.batch_norm_prior(images[None])) < 0.02


def test_rounds_of_all_images_and_not_of_other_batches_are_searched_together(sent):
    seen, truth = sent(
        {"data.samples": 14, "audit.threat_model": ["gradients", "architecture", "batch-size"]}, rounds=3
    )
    assert AttackPlan(seen).same_images
    (found,) = GradientInversionAttack().attack(seen, truth)
    assert isinstance(found, Finding)
    assert found.assumed[-1] == "2 rounds of the same images are searched together"
    assert found.verdict.evidence["images"] == len(truth.used)
    seen, _ = sent({"optimizer.batch_size": 2}, rounds=2, batch="mini")
    assert not AttackPlan(seen).same_images


KEPT = {"audit.keep_parcels": 0, "sites.count": 2, "optimizer.batch_size": 2, "optimizer.momentum": 0.0}


def kept(study, undisturbed, operation: str) -> tuple[Seen, Release, Truth]:
    """The first release of an operation, as an attacker sees it and with what only the site knows."""
    tools, (of_first, _) = what_was_kept(study, undisturbed(study).folder)
    release = next(one for one in of_first if one.operation == operation)
    return Seen.of("site-1", release, 0, tools), release, Truth(release.used, tools.site_data("site-1"), 0)


def unexplained(simulation: Simulation, seen: Seen, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The squared distance of what was sent from what is simulated, as a share of its squared length."""
    observed, sent = simulation.observe(seen.parcel.tensors), simulation(images, labels)
    rest = sum((observed[name] - sent[name]).square().sum() for name in simulation.names)
    return float(rest / sum(tensor.square().sum() for tensor in observed.values()))


def test_masks(tiny, undisturbed):
    masks = {"data.source": "brain-phantom", "data.samples": 60, "task.name": "segmentation", "model.backbone": "unet"}
    granted = {"audit.threat_model": [*Audit().threat_model, Capability.LABELS]}
    study = tiny("fedsgd", {**KEPT, **masks, **granted}, rounds=1, batch="mini")
    seen, _, truth = kept(study, undisturbed, "gradient")
    known = attack_updates.AttackPlan(seen).knowledge(truth)
    simulation = Simulation(prepare_for_attack(known.model), known.loss, names=list(seen.parcel.tensors))
    images = truth.images(torch.cat(truth.batches))
    assert unexplained(simulation, seen, images, known.labels[0]) < 1e-8
    assert unexplained(simulation, seen, images, 1 - known.labels[0]) > 0.1


def test_fronts(tiny, undisturbed):
    study = tiny("splitnn", {**KEPT, "model.backbone": "small-cnn"}, rounds=1, local_steps=1)
    seen, release, _ = kept(study, undisturbed, "finish")
    _, _, truth = kept(study, undisturbed, "forward")  # which knows the images of the turn's only step
    assert is_front(seen)
    front, _ = split(seen.network, study.cut)
    names = [name for name, _ in front.named_parameters()]
    simulation = Simulation(
        prepare_for_attack(front), loss_with_gradients, names=names, training=LocalTraining(study.optimizer.lr_in(1))
    )
    images, sent = truth.images(torch.cat(truth.batches)), release.received("gradients")["activations"]
    assert unexplained(simulation, seen, images, sent) < 1e-6
    assert unexplained(simulation, seen, images.flip(0), sent) > 0.01


class Perceptron(Backbone):
    """A network that begins with a linear layer."""

    name: ClassVar[str] = "perceptron"
    summary: ClassVar[str] = "two linear layers"
    stages: ClassVar[dict[str, tuple[str, ...]]] = {"hidden": ("flatten", "first", "tanh"), "head": ("last",)}

    def __init__(self, channels: int, outputs: int, size: int, norm: str) -> None:
        super().__init__(channels, outputs, size, norm)
        self.flatten, self.tanh = nn.Flatten(), nn.Tanh()
        self.first, self.last = nn.Linear(channels * size * size, 8), nn.Linear(8, outputs)


@pytest.fixture
def findings(tiny, undisturbed, monkeypatch, hurry):
    """`findings("fedsgd", "perceptron")`: what analytic inversion found in one step of one image."""
    hurry()  # what is computed takes no steps
    monkeypatch.setitem(BACKBONES, "perceptron", Perceptron)

    def run(method: str, backbone: str, **settings) -> list[dict]:
        changes = {
            "audit.keep_parcels": 0, "sites.count": 2, "data.test": 0.4, "model.backbone": backbone,
            "optimizer.batch_size": 1, "optimizer.augment": [],
        }  # fmt: skip
        study = tiny(method, changes, **{"rounds": 1, **settings})
        report = audit(undisturbed(study).folder)
        found = [one for parcel in report["parcels"] for one in parcel["findings"]]
        return [one for one in found if one["attack"] == "analytic-inversion"]

    return run


@pytest.mark.parametrize(("method", "settings"), [("fedsgd", {"batch": "mini"}), ("fedavg", {"local_steps": 1})])
def test_one_image_of_a_perceptron_comes_back(findings, method, settings):
    (found,) = findings(method, "perceptron", **settings)
    assert found["verdict"] == "leaks"
    assert found["evidence"]["recovered"] == 1
    assert found["evidence"]["psnr"] > 60
    assert found["assumed"][0].startswith("0.0% of the first layer's gradient")
    assert "linear layer with a bias" in found["threat_model"]


@pytest.mark.slow
def test_a_network_that_begins_with_a_convolution_has_no_such_finding(findings):
    assert findings("fedsgd", "lenet5", batch="mini") == []


BY_TWOS = {"audit.keep_parcels": 0, "sites.count": 2, "data.test": 0.5, "data.samples": 80, "optimizer.batch_size": 2}


@pytest.fixture
def trained(tiny, undisturbed):
    """What a site sent after two steps on two images each, with momentum, as its receiver sees it, and what is true."""
    study = tiny("fedavg", {**BY_TWOS, "optimizer.momentum": 0.9}, rounds=1, local_steps=2)
    return first_view(undisturbed(study).folder, "weights")


def test_a_planted_update_is_attacked_by_the_same_plan_after_steps_of_sgd_with_momentum(trained):
    seen, truth = trained
    (planted,) = GradientInversionAttack().planted(seen, truth)
    real, made = AttackPlan(seen), AttackPlan(planted.seen)
    assert (made.steps, made.images, made.exact) == (real.steps, real.images, real.exact) == (2, 4, True)
    assert vars(made._training()) == vars(real._training())
    assert [len(batch) for batch in planted.truth.batches] == [2, 2]
    assert "2 steps" in planted.words
    seen, truth = trained
    (planted,) = GradientInversionAttack().planted(seen, truth)
    task, target = seen.tools.assembly.study.task, seen.tools.assembly.target
    settings = seen.tools.assembly.study.optimizer
    model = copy.deepcopy(seen.network).train()
    optimizer = torch.optim.SGD(model.parameters(), settings.lr, 0.9, weight_decay=settings.weight_decay)
    for rows in planted.truth.batches:
        optimizer.zero_grad()
        labels = planted.truth.labels(rows)
        losses = task.losses(model(planted.truth.images(rows)), task.targets(labels, None), target)
        losses.mean().backward()  # of two images, half by each
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.allclose(planted.seen.parcel.tensors[name], parameter, atol=1e-5), name


def test_the_network_that_the_site_was_sent_stays_as_it_was(trained):
    network = trained[0].network
    before = copy.deepcopy(network.state_dict())
    sent_model(trained[0])
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


def test_a_search_starts_at_the_attackers_mean_image_and_doubts_what_was_augmented(trained):
    seen, truth = trained
    search = with_start(AttackPlan(seen), truth)
    assert search.settings.start == "given"
    assert search.knowledge.start_images.shape == (1, 4, *seen.tools.image_shape)
    assert "held-out images of the other sites" in search.assumed[-1]
    without = replace(seen.tools, threat=seen.tools.threat.model_copy(update={"granted": frozenset()}))
    assert with_start(AttackPlan(replace(seen, tools=without)), truth).settings.start != "given"
    seen, truth = trained
    search = with_start(AttackPlan(seen), truth)
    study = seen.tools.assembly.study.with_settings({"optimizer.augment": ["flip"]})
    turned = replace(seen, tools=replace(seen.tools, assembly=replace(seen.tools.assembly, study=study)))
    assert "augmented" in unfinished(turned, truth, search, torch.zeros(1), 0.0)


def test_site_inference_is_asked_about_images_that_the_plant_never_saw(trained):
    seen, truth = trained
    (planted,) = SiteInferenceAttack().planted(seen, truth)
    held_out = truth.held_out(seen.tools.effort.candidates)[0]
    asked = planted.truth.held_out(seen.tools.effort.candidates)[0]
    assert len(asked) == len(held_out) - len(held_out) // 2
    seen_in_training = (held_out[: len(held_out) // 2].float() * 0.7).round().to(torch.uint8)
    assert not any(torch.equal(one, other) for one in asked for other in seen_in_training)


def test_a_planted_memory_stops_near_its_goal_and_a_rare_projection_leaves_a_doubt():
    """A pass that goes from an area of 0.5 to 1.0 is cut where it reaches 0.7."""
    before, after = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
    weakest, area = weakest_between(before, after, lambda state: 0.5 + 0.5 * float(state["w"]))
    assert WEAKEST <= area < WEAKEST + 0.02
    assert float(weakest["w"]) == pytest.approx(0.4, abs=0.02)
    said = Verdict(False, "nothing", {"p_members_closer": 0.02})
    assert with_doubt(Finding("projection", "", said)).doubt


PUBLIC = {**BY_TWOS, "model.backbone": "efficientnet-lite0-1024", "model.input_size": 32, "data.size": 32}


def test_images_are_not_searched_behind_an_encoder_without_gradients(tiny, undisturbed):
    seen, truth = first_view(undisturbed(tiny("fedavg", PUBLIC, rounds=1, local_steps=1)).folder, "weights")
    (gap,) = GradientInversionAttack().attack(seen, truth)
    assert isinstance(gap, NotTried)
    assert "encoder" in gap.why


def test_a_tensor_that_no_attack_reads_leaves_a_gap(trained):
    """A plug-in method may put anything beside the network's weights."""
    seen, _ = trained
    assert without_unread(seen) == (seen, [])
    spoiled = Parcel("weights", {**seen.parcel.tensors, "diary": torch.zeros(3, 8, 8)}, seen.parcel.metadata)
    clean, (gap,) = without_unread(replace(seen, parcel=spoiled, together=(spoiled,)))
    assert clean.parcel.tensors.keys() == seen.parcel.tensors.keys()
    assert clean.together == (clean.parcel,)
    assert "'diary', which no attack reads" in gap.why
    assert (gap.question, gap.excluded) == (EVERY_QUESTION, False)


@pytest.mark.parametrize(("kind", "known", "extra"), [
    ("statistics", {"counts": 2, "first": 2, "second": 2}, {"thumbnails": 2}),
    ("metrics", {"histograms": 30, "confusion": 9, "loss": 1}, {"losses": 40}),
    ("metrics", {"confusion": 9}, {f"piece{number:02}": 8 for number in range(9)}),
    ("statistics", {"something": 3}, {}), ("synthetic-images", {"images": 12, "labels": 3}, {"more": 90}),
    ("activations", {"activations": 12}, {"images": 90}),
    ("latents", {"latents": 12, "low": 2, "step": 2, "flipped_latents": 12}, {"images": 90}),
    ("masks", {"anything": 12}, {}),
])  # fmt: skip
def test_sums_have_tensors_that_are_known(kind, known, extra):
    tensors = {name: torch.zeros(size) for name, size in (known | extra).items()}
    assert unread_names(SimpleNamespace(kind=kind, parcel=Parcel(kind, tensors, {}))) == list(extra)


def test_held_out_images_that_were_trained_on_are_not_held_out(trained):
    """Duplicates, or one folder given twice: a copy of such an image would look as near to a held-out one."""
    data = trained[1].data
    names = ("images", "labels")
    both = ImageSet(**{one: np.concatenate([getattr(data.test, one), getattr(data.train, one)]) for one in names})
    assert len(Truth([], replace(data, test=both), 0).data.test) == len(data.test)
    assert not len(Truth([], replace(data, test=data.train), 0).data.test)
    assert Truth([], data, 0).data is data


@pytest.mark.parametrize(("method", "changes", "more"), [
    ("fedavg", {"optimizer.momentum": 0.9, "optimizer.weight_decay": 0.1}, {}),
    ("fedprox", {"optimizer.momentum": 0.0}, {"mu": 20.0}),
])  # fmt: skip
def test_an_update_taken_as_it_was_made_is_explained_by_its_images(tiny, undisturbed, method, changes, more):
    study = tiny(method, {**KEPT, "data.test": 0.4, **changes}, rounds=1, local_steps=2, **more)
    seen, _, truth = kept(study, undisturbed, "train")
    plan = AttackPlan(seen)
    assert plan.exact
    known, index = plan.knowledge(truth), torch.cat(truth.batches)
    simulation = Simulation(prepare_for_attack(known.model), names=list(seen.parcel.tensors), training=known.training)
    classes = nn.functional.one_hot(truth.labels(index).long(), known.classes).float()
    assert unexplained(simulation, seen, truth.images(index), classes) < 1e-6


IMAGES = torch.rand(4, 1, 8, 8, generator=torch_rng("outside doubts", "images"))


@pytest.fixture
def update() -> Update:
    """One step on the first image."""
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(144, 2))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch_rng("outside doubts", parameter.numel())) / 3)
    before = {name: one.detach().clone() for name, one in network.named_parameters()}
    settings = UpdateSettings(lr=0.1, weight_decay=0.0, batch_norm="eval")
    return plant(Update(network, before, before, settings, (1, 8, 8), 2), IMAGES[:1])


def test_the_true_image_explains_the_update_and_what_does_not_leaves_a_doubt(update):
    found = distances(update, IMAGES)
    assert float(found[0]) < 1e-4
    assert float(found[1:].min()) > 100 * float(found[0])
    assert "had not ended" in doubt_about(update, IMAGES[:1], IMAGES[1:2])
    assert "had not ended" in doubt_about(update, IMAGES[:1], torch.full_like(IMAGES[:1], torch.nan))
    assert doubt_about(update, IMAGES[:1], IMAGES[:1]) == ""
    # The search found the image, and it is not in the folder that was named.
    assert "none of --images does" in doubt_about(update, IMAGES[1:], IMAGES[:1])


def test_held_out_images_that_were_trained_on_are_left_out():
    pixels = (IMAGES * 255).to(torch.uint8)
    held = ImageFolder(pixels, torch.arange(4), ("a", "b", "c", "d"))
    left = held.without(ImageFolder(pixels[1:3], None, ()))
    assert left.labels.tolist() == [0, 3]
    with pytest.raises(BadInput, match="--held-out: all its images are among those trained on"):
        held.without(held)
