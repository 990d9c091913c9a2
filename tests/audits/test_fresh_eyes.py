"""What a reviewer found in the audit, each with a test that failed before."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_audits import first_view, opened

from polyclinic.attacks.attack import Verdict
from polyclinic.audits.attack import EVERY_QUESTION, Finding, NotTried
from polyclinic.audits.attack_membership import WEAKEST, sent_model, weakest_between
from polyclinic.audits.attack_site import SiteInferenceAttack
from polyclinic.audits.attack_updates import AttackPlan, GradientInversionAttack, with_start
from polyclinic.audits.audit import unread_names, without_unread
from polyclinic.audits.open_run import open_run
from polyclinic.audits.parcels import parcels_to_audit
from polyclinic.audits.run_inversion import unfinished
from polyclinic.audits.truth import Truth
from polyclinic.audits.verdicts import with_doubt
from polyclinic.data.parts import ImageSet
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.parcel import Parcel

STUDY = {"audit.keep_parcels": 0, "sites.count": 2, "data.test": 0.5, "data.samples": 80, "optimizer.batch_size": 2}


@pytest.fixture
def trained(tiny, undisturbed):
    """(tools, parcel) of the weights that a site sent after two steps on two images each, with momentum."""
    folder = undisturbed(tiny("fedavg", {**STUDY, "optimizer.momentum": 0.9}, rounds=1, local_steps=2)).folder
    tools, (audited, *_) = opened(folder, "weights")
    return tools, audited


def test_the_planted_update_is_attacked_by_the_same_plan(trained):
    tools, audited = trained
    seen, truth = audited.seen(tools), audited.truth(tools)
    (planted,) = GradientInversionAttack().planted(seen, truth)
    real, made = AttackPlan(seen), AttackPlan(planted.seen)
    assert (made.steps, made.images, made.exact) == (real.steps, real.images, real.exact) == (2, 4, True)
    assert vars(made._training()) == vars(real._training())
    assert [len(batch) for batch in planted.truth.batches] == [2, 2]
    assert "2 steps" in planted.words


def test_two_planted_steps_are_those_of_sgd_with_momentum(trained):
    tools, audited = trained
    seen, truth = audited.seen(tools), audited.truth(tools)
    (planted,) = GradientInversionAttack().planted(seen, truth)
    task, target = tools.assembly.study.task, tools.assembly.target
    settings = tools.assembly.study.optimizer
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
    tools, audited = trained
    seen = audited.seen(tools)
    before = copy.deepcopy(seen.network.state_dict())
    sent_model(seen)
    after = seen.network.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_search_starts_at_the_attackers_mean_image_where_it_has_images(trained):
    tools, audited = trained
    seen, truth = audited.seen(tools), audited.truth(tools)
    search = with_start(AttackPlan(seen), truth)
    assert search.settings.start == "given"
    assert search.knowledge.start_images.shape == (1, 4, *tools.image_shape)
    assert "held-out images of the other sites" in search.assumed[-1]
    without = replace(tools, threat=tools.threat.model_copy(update={"granted": frozenset()}))
    assert with_start(AttackPlan(audited.seen(without)), truth).settings.start != "given"


def test_after_augmentation_nobody_knows_the_loss_of_the_true_images(trained):
    tools, audited = trained
    seen, truth = audited.seen(tools), audited.truth(tools)
    search = with_start(AttackPlan(seen), truth)
    study = tools.assembly.study.with_settings({"optimizer.augment": ["flip"]})
    turned = replace(seen, tools=replace(tools, assembly=replace(tools.assembly, study=study)))
    assert "augmented" in unfinished(turned, truth, search, torch.zeros(1), 0.0)


def test_site_inference_is_asked_about_images_that_the_plant_never_saw(trained):
    tools, audited = trained
    seen, truth = audited.seen(tools), audited.truth(tools)
    (planted,) = SiteInferenceAttack().planted(seen, truth)
    held_out = truth.held_out(tools.effort.candidates)[0]
    asked = planted.truth.held_out(tools.effort.candidates)[0]
    assert len(asked) == len(held_out) - len(held_out) // 2
    seen_in_training = (held_out[: len(held_out) // 2].float() * 0.7).round().to(torch.uint8)
    assert not any(torch.equal(one, other) for one in asked for other in seen_in_training)


def test_a_planted_memory_stops_near_its_goal():
    """A pass that goes from an area of 0.5 to 1.0 is cut where it reaches 0.7."""
    before, after = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
    weakest, area = weakest_between(before, after, lambda state: 0.5 + 0.5 * float(state["w"]))
    assert WEAKEST <= area < WEAKEST + 0.02
    assert float(weakest["w"]) == pytest.approx(0.4, abs=0.02)


PUBLIC = {**STUDY, "model.backbone": "efficientnet-lite0-1024", "model.input_size": 32, "data.size": 32}


def test_a_run_whose_parcels_no_attack_fits_is_not_told_to_add_a_table(tiny, undisturbed, tmp_path):
    folder = undisturbed(tiny("fedavg", {**PUBLIC, "audit.keep_parcels": 0}, rounds=1, local_steps=1)).folder
    assembly, lines = open_run(folder)
    bare = tmp_path / "bare"
    (bare / "sites").mkdir(parents=True)
    with pytest.raises(BadInput, match=r"kept none of the parcels that left \(metrics, weights\); run the study again"):
        parcels_to_audit(bare, assembly.study, lines, "quick", (), ())


def test_images_are_not_searched_behind_an_encoder_without_gradients(tiny, undisturbed):
    seen, truth = first_view(undisturbed(tiny("fedavg", PUBLIC, rounds=1, local_steps=1)).folder, "weights")
    (gap,) = GradientInversionAttack().attack(seen, truth)
    assert isinstance(gap, NotTried)
    assert "encoder" in gap.why


def test_a_tensor_that_no_attack_reads_leaves_a_gap(trained):
    """A plug-in method may put anything beside the network's weights."""
    tools, audited = trained
    seen = audited.seen(tools)
    assert without_unread(seen) == (seen, [])
    spoiled = Parcel("weights", {**seen.parcel.tensors, "diary": torch.zeros(3, 8, 8)}, seen.parcel.metadata)
    clean, (gap,) = without_unread(replace(seen, parcel=spoiled, together=(spoiled,)))
    assert clean.parcel.tensors.keys() == seen.parcel.tensors.keys()
    assert clean.together == (clean.parcel,)
    assert "'diary', which no attack reads" in gap.why
    assert (gap.question, gap.excluded) == (EVERY_QUESTION, False)


@pytest.mark.parametrize(
    ("kind", "known", "extra"),
    [
        ("statistics", {"counts": 2, "first": 2, "second": 2}, {"thumbnails": 2}),
        ("metrics", {"histograms": 30, "confusion": 9, "loss": 1}, {"losses": 40}),
        ("metrics", {"confusion": 9}, {f"piece{number:02}": 8 for number in range(9)}),
        ("statistics", {"something": 3}, {}),
        ("synthetic-images", {"images": 12, "labels": 3}, {"more": 90}),
        ("activations", {"activations": 12}, {"images": 90}),
        ("latents", {"latents": 12, "low": 2, "step": 2, "flipped_latents": 12}, {"images": 90}),
        ("masks", {"anything": 12}, {}),
    ],
)
def test_sums_have_tensors_that_are_known(kind, known, extra):
    tensors = {name: torch.zeros(size) for name, size in (known | extra).items()}
    assert unread_names(SimpleNamespace(kind=kind, parcel=Parcel(kind, tensors, {}))) == list(extra)


def test_held_out_images_that_were_trained_on_are_not_held_out(trained):
    """Duplicates, or one folder given twice: a copy of such an image would look as near to a held-out one."""
    tools, audited = trained
    data = audited.truth(tools).data
    both = ImageSet(
        **{name: np.concatenate([getattr(data.test, name), getattr(data.train, name)]) for name in ("images", "labels")}
    )
    assert len(Truth([], replace(data, test=both), 0).data.test) == len(data.test)
    assert not len(Truth([], replace(data, test=data.train), 0).data.test)
    assert Truth([], data, 0).data is data


def test_a_projection_that_chance_seldom_gives_leaves_a_doubt():
    said = Verdict(False, "nothing", {"p_members_closer": 0.02})
    assert with_doubt(Finding("projection", "", said)).doubt
