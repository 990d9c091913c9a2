"""From which site does an update come? Told by gains of held-out images, beside every other site's."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from polyclinic.audits import attack_site
from polyclinic.audits.attack_site import ORIGIN, Asked, gains, image_finding, origin_finding
from polyclinic.metrics.statistics.significance import chance_of_order
from polyclinic.randomness import torch_rng

NAMES = ["east"] * 20 + ["west"] * 20


def drawn(count: int, name: str, mean: float = 0.0) -> Tensor:
    return mean + torch.randn(count, generator=torch_rng("site of update", name)).double()


def seen(level: float = 0.001) -> SimpleNamespace:
    return SimpleNamespace(tools=SimpleNamespace(level=level), where="north, weights, round 1")


def asked(own: float, east: float, west: float, cases: bool = False) -> Asked:
    others = torch.cat([drawn(20, "east", east), drawn(20, "west", west)])
    known = (np.arange(30) // 3, np.arange(40) // 4) if cases else (None, None)
    return Asked(drawn(30, "own", own), others, NAMES, *known)


def test_an_update_points_to_its_site_where_it_stands_out_from_every_other():
    found = origin_finding(seen(), asked(3.0, 0.0, 0.0))
    assert found.verdict.leak
    assert (found.attack, found.question) == (ORIGIN, "origin")
    assert (found.verdict.evidence["place_of_site"], found.verdict.evidence["sites_compared"]) == (1, 3)


def test_one_site_that_is_as_near_leaves_the_origin_open_though_images_are_told():
    """West's images gain as much as the site's own: images can be told from most others, but two sites are left."""
    rows = asked(3.0, -5.0, 3.0)
    assert image_finding(seen(), rows).verdict.leak
    found = origin_finding(seen(), rows)
    assert not found.verdict.leak
    assert found.verdict.evidence["nearest_site"] == "west"
    assert found.verdict.evidence["order_by_chance"] == pytest.approx(chance_of_order(rows.own, rows.others[20:]))


def test_patients_count_once():
    by_image, by_patient = (origin_finding(seen(), asked(0.8, 0.0, 0.0, cases)) for cases in (False, True))
    chances = [found.verdict.evidence["order_by_chance"] for found in (by_image, by_patient)]
    assert chances[0] < chances[1]


def test_what_any_update_gives_an_image_does_not_count(monkeypatch):
    """Some images gain by everybody's update; only what this one gives beyond the others' is the site's."""
    difficulty = torch.tensor([5.0, 0.0, 2.0], dtype=torch.float64)
    extra = {"north": torch.tensor([0.0, 0.0, 1.0]), "east": torch.zeros(3), "west": torch.zeros(3)}
    monkeypatch.setattr(attack_site, "gains_by", lambda one, images, answers: difficulty + extra[one.site])
    monkeypatch.setattr(attack_site, "unsent_names", lambda one: set())
    peers = tuple(SimpleNamespace(site=name) for name in ("east", "west"))
    own = SimpleNamespace(site="north", peers=lambda: peers)
    assert gains(own, torch.zeros(3), torch.zeros(3)).tolist() == [0.0, 0.0, 1.0]
    alone = SimpleNamespace(site="north", peers=tuple)
    assert gains(alone, torch.zeros(3), torch.zeros(3)).tolist() == [5.0, 0.0, 3.0]
