"""Updates: priors, simulated training, and first layers."""

from typing import ClassVar

import pytest
import torch
from small_audits import first_view, what_was_kept
from torch import nn

from polyclinic.attacks.attack import Capability
from polyclinic.attacks.gradient_inversion.networks import prepare_for_attack
from polyclinic.attacks.gradient_inversion.objective import LocalTraining, Simulation
from polyclinic.audits import attack_updates
from polyclinic.audits.attack import Finding, Seen
from polyclinic.audits.attack_updates import (
    BATCH_NORM_PRIOR,
    AttackPlan,
    GradientInversionAttack,
    with_priors,
    with_start,
)
from polyclinic.audits.audit import audit
from polyclinic.audits.planting import planted_update
from polyclinic.audits.run_inversion import is_front, loss_with_gradients
from polyclinic.audits.truth import Truth
from polyclinic.federation.ledger.archive import Release
from polyclinic.models import BACKBONES, split
from polyclinic.models.backbone import Backbone
from polyclinic.study.tables import Audit

STUDY = {"audit.keep_parcels": 0, "sites.count": 2, "data.test": 0.5, "optimizer.momentum": 0.0}


@pytest.fixture
def sent(tiny, undisturbed, hurry):
    """`sent(changes, rounds=2)`: the first gradients of site-1 as their receiver sees them, and what is true."""
    hurry(images=8, releases=2)

    def of_run(changes: dict, **method) -> tuple[Seen, Truth]:
        return first_view(undisturbed(tiny("fedsgd", {**STUDY, **changes}, **method)).folder, "gradients", ("site-1",))

    return of_run


def test_statistics_that_left_are_those_of_the_batch(sent):
    seen, truth = sent({"model.backbone": "small-cnn", "optimizer.batch_size": 4}, rounds=1, batch="mini")
    plan = AttackPlan(seen)
    search = with_priors(plan, with_start(plan, truth))
    assert search.settings.batch_norm_prior == BATCH_NORM_PRIOR
    assert "batch-norm statistics" in search.assumed[-1]
    knowledge = search.knowledge
    used = truth.images(torch.cat(truth.batches))
    assert float(knowledge.batch_norm_prior(used[None])) < 0.02
    assert float(knowledge.batch_norm_prior(torch.rand_like(used)[None])) > 1


def test_a_planted_update_has_the_same_company(sent):
    seen, truth = sent({"model.backbone": "small-cnn", "optimizer.batch_size": 4}, rounds=1, batch="mini")
    (planted,) = planted_update(seen, truth)
    real, made = seen.companion("statistics"), planted.seen.companion("statistics")
    assert made.tensors.keys() == real.tensors.keys()
    assert made.digest != real.digest
    plan = AttackPlan(planted.seen)
    knowledge = with_priors(plan, with_start(plan, planted.truth)).knowledge
    images = planted.truth.images(torch.cat(planted.truth.batches))
    assert float(knowledge.batch_norm_prior(images[None])) < 0.02


def test_rounds_of_all_images_are_searched_together(sent):
    seen, truth = sent(
        {"data.samples": 14, "audit.threat_model": ["gradients", "architecture", "batch-size"]}, rounds=3
    )
    assert AttackPlan(seen).same_images
    (found,) = GradientInversionAttack().attack(seen, truth)
    assert isinstance(found, Finding)
    assert found.assumed[-1] == "2 rounds of the same images are searched together"
    assert found.verdict.evidence["images"] == len(truth.used)


def test_other_batches_are_not_searched_together(sent):
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
