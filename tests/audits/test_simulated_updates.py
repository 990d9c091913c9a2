"""What an audit takes for the site's update is the update: with the true images in place nothing is left to explain."""

from __future__ import annotations

import torch

from polyclinic.attacks.attack import Capability
from polyclinic.attacks.gradient_inversion.networks import prepare_for_attack
from polyclinic.attacks.gradient_inversion.simulation import LocalTraining, Simulation
from polyclinic.audits import attack_updates
from polyclinic.audits.attack import Seen, Tools
from polyclinic.audits.run_inversion import is_front, loss_with_gradients
from polyclinic.audits.truth import Truth
from polyclinic.data.parts import prepare
from polyclinic.federation.ledger.archive import Release, releases
from polyclinic.metrics.perceptual import Pixels
from polyclinic.models import split
from polyclinic.runner.run.assembly import Assembly
from polyclinic.study.tables import EFFORTS, Audit

KEPT = {"audit.keep_parcels": 0, "sites.count": 2, "optimizer.batch_size": 2, "optimizer.momentum": 0.0}


def kept(study, undisturbed, operation: str) -> tuple[Seen, Release, Truth]:
    """The first release of an operation, as an attacker sees it and with what only the site knows."""
    folder = undisturbed(study).folder
    assembly = Assembly(study, prepare(study.data, study.sites), folder)
    tools = Tools(assembly, study.audit.threat, EFFORTS["quick"], Pixels(), 0, "cpu")
    found = [one for one in releases(folder / "sites" / "site-1" / "kept") if one.operation == operation]
    data = tools.site_data("site-1")
    return Seen.of("site-1", found[0], 0, tools), found[0], Truth(found[0].used, data, 0)


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
