"""What an audit's search for images takes into account: batch-norm statistics that left, and several rounds."""

from __future__ import annotations

import pytest
import torch

from polyclinic.audits.attack import Finding, Seen
from polyclinic.audits.attack_updates import (
    BATCH_NORM_PRIOR,
    AttackPlan,
    GradientInversionAttack,
    with_priors,
    with_start,
)
from polyclinic.audits.audit import build_tools
from polyclinic.audits.open_run import open_run
from polyclinic.audits.parcels import parcels_to_audit
from polyclinic.audits.planting import planted_update
from polyclinic.audits.truth import Truth

STUDY = {"audit.keep_parcels": 0, "sites.count": 2, "data.test": 0.5, "optimizer.momentum": 0.0}


@pytest.fixture
def sent(tiny, undisturbed, hurry):
    """`sent(changes, rounds=2)`: the first gradients of site-1 as their receiver sees them, and what is true."""
    hurry(images=8, releases=2)

    def of_run(changes: dict, **method) -> tuple[Seen, Truth]:
        folder = undisturbed(tiny("fedsgd", {**STUDY, **changes}, **method)).folder
        assembly, lines = open_run(folder)
        audited = parcels_to_audit(folder, assembly.study, lines, "quick", ("gradients",), ("site-1",))[0]
        tools = build_tools(assembly, "quick", "pixels", "cpu")
        return audited.seen(tools), audited.truth(tools)

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
    (planted,) = planted_update(seen, truth, AttackPlan(seen).steps_to_plant)
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
