"""Membership in an audit: reference models beside the loss, and a planted memory that must be found."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from polyclinic.attacks.membership import rmia
from polyclinic.audits.attack import Finding
from polyclinic.audits.attack_membership import WEAKEST, LossMembershipAttack, ReferenceMembershipAttack
from polyclinic.audits.attack_site import SiteInferenceAttack
from polyclinic.audits.audit import build_tools
from polyclinic.audits.open_run import open_run
from polyclinic.audits.parcels import parcels_to_audit
from polyclinic.errors import BadInput
from polyclinic.randomness import torch_rng

STUDY = {"audit.keep_parcels": 0, "sites.count": 2, "data.test": 0.5, "data.samples": 160, "optimizer.momentum": 0.0}


def draws(count: int, name: str, mean: float = 0.0) -> Tensor:
    return mean + torch.randn(count, generator=torch_rng("rmia", name)).double()


def test_rmia_by_hand():
    """Ratios 2, 1 and 0.25; the last two are the population: the member beats both, each of them ties with itself."""
    observed = torch.tensor([0.8, 0.4, 0.1]).log()
    shadows = torch.tensor([[0.4, 0.4, 0.4], [0.4, 0.4, 0.4]]).log()
    population = torch.tensor([False, True, True])
    assert rmia(observed, shadows, population).tolist() == [1.0, 0.75, 0.25]
    alike = rmia(torch.zeros(6), torch.zeros(4, 6), torch.arange(6) >= 3)
    assert len(set(alike.tolist())) == 1  # nobody is told by a tie
    with pytest.raises(BadInput, match="RMIA takes scores"):
        rmia(observed, shadows, population & False)


def test_rmia_finds_members_that_reference_models_do_not_explain():
    """Images differ in difficulty by far more than membership does; the ratio to reference models removes that."""
    difficulty, count = 5 * draws(200, "difficulty"), 100
    shadows = difficulty + 0.2 * torch.stack([draws(200, f"shadow {n}") for n in range(4)])
    observed = difficulty + 0.2 * draws(200, "observed")
    observed[:count] += 1.0
    found = rmia(observed, shadows, torch.arange(200) >= count)
    assert float(found[:count].mean()) > 0.9
    assert float(found[count:].mean()) == pytest.approx(0.5, abs=0.01)


@pytest.fixture(scope="module")
def sent(tiny, undisturbed, tmp_path_factory):
    """A kept release of a short run, as its receiver sees it."""
    done = undisturbed(tiny("fedavg", STUDY, rounds=1))
    folder = tmp_path_factory.mktemp("membership") / "run"
    shutil.copytree(done.folder, folder)
    assembly, lines = open_run(folder)
    (audited,) = parcels_to_audit(folder, assembly.study, lines, "quick", ("weights",), ("site-1",))
    tools = build_tools(assembly, "quick", "pixels", "cpu")
    return audited.seen(tools), audited.truth(tools)


def test_a_planted_memory_is_weak_and_is_no_copy(sent):
    seen, truth = sent
    (planted,) = LossMembershipAttack().planted(seen, truth)
    held_out, _ = truth.held_out(1000)
    members, _ = planted.truth.members(1000)
    assert len(members) == len(held_out) // 2
    assert float(planted.words.rsplit(" ", 1)[1]) >= WEAKEST - 0.2
    assert planted.seen.parcel.digest != seen.parcel.digest
    assert planted.seen.parcel.tensors.keys() == seen.parcel.tensors.keys()


def test_reference_models_give_both_scores_with_figures(sent):
    rmia_found, lira_found = ReferenceMembershipAttack().attack(*sent)
    assert isinstance(rmia_found, Finding)
    assert isinstance(lira_found, Finding)
    assert (rmia_found.attack, lira_found.attack) == ("rmia", "lira")
    for found in (rmia_found, lira_found):
        assert found.question == "membership"
        assert found.verdict.evidence["hits_rare_low"] <= found.verdict.evidence["hits_rare"]
        assert 0 <= found.verdict.evidence["auc"] <= 1


def test_sites_that_are_alike_cannot_be_told_and_a_planted_site_is_weak(sent):
    seen, truth = sent
    image, origin = SiteInferenceAttack().attack(seen, truth)
    assert isinstance(image, Finding)
    assert isinstance(origin, Finding)
    assert (image.question, origin.question) == ("site", "origin")
    assert not image.verdict.leak
    assert not origin.verdict.leak
    assert [peer.site for peer in seen.peers()] == ["site-2"]  # whose update of the same round is compared with
    (planted,) = SiteInferenceAttack().planted(seen, truth)
    held_out, _ = truth.held_out(150)
    assert len(planted.truth.held_out(150)[0]) == len(held_out) // 2
