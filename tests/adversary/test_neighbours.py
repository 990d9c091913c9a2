"""Differential privacy to the letter: a site without one image releases a sum that differs by that image alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attacked_site import PRIVATE
from torch import nn

from polyclinic.federation.site import Site, SiteState
from polyclinic.training import private_steps as private

CLIP = 0.05


def private_sum(host, keep, cases=None):
    """The clipped sum over some of a site's images, with noise too small to see. `cases` says whose all images are."""
    site: Site = host.sites.get("north")
    chosen = {name: getattr(site.data.train, name) for name in ("images", "labels", "masks", "cases", "subgroup")}
    train = replace(site.data.train, **{n: None if a is None else np.asarray(a)[keep] for n, a in chosen.items()})
    if cases is not None:
        train = replace(train, cases=cases[keep])
    alone = replace(site, data=replace(site.data, train=train), state=SiteState(), cache={})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = private.gradients(alone, 1.0)
    units = len(keep) if cases is None else len(np.unique(cases[keep]))
    return torch.cat([tensor.flatten() for tensor in found.values()]) * units


@pytest.mark.parametrize("dropout", [False, True])
def test_removing_one_image_moves_the_sum_by_no_more_than_the_clipping_norm(kit, dropout):
    """With draws by place in the batch all images behind the missing one changed theirs."""
    study = {**PRIVATE, "max_grad_norm": CLIP, "noise_multiplier": 1e-6}
    host = kit.host(
        method={"name": "fedsgd", "rounds": 2}, privacy=study, optimizer__augment=["flip", "turn"], optimizer__lr=0.1
    )
    model = host.spec.trainer.model
    if dropout:
        model.fc2 = nn.Sequential(nn.Dropout(0.5), model.fc2)
    count = len(host.sites.get("north").data.train)
    whole = private_sum(host, np.arange(count))
    for missing in (0, count // 2, count - 1):
        moved = float((whole - private_sum(host, np.delete(np.arange(count), missing))).norm())
        assert 0 < moved <= CLIP * 1.01


def test_removing_one_patient_moves_the_sum_by_no_more_than_the_clipping_norm(kit):
    """With clipping by image it moved by as many norms as the patient has images."""
    moved = {}
    for unit in ("patient", "image"):
        study = {**PRIVATE, "max_grad_norm": CLIP, "noise_multiplier": 1e-6, "unit": unit}
        host = kit.host(unit, method={"name": "fedsgd", "rounds": 2}, privacy=study, optimizer__augment=["flip"])
        count = len(host.sites.get("north").data.train)
        cases = np.arange(count) // 5
        whole = private_sum(host, np.arange(count), None if unit == "image" else cases)
        fewer = private_sum(host, np.flatnonzero(cases != 2), None if unit == "image" else cases)
        moved[unit] = float((whole - fewer).norm())
    assert 0 < moved["patient"] <= CLIP * 1.01
    assert moved["image"] > 2 * CLIP
