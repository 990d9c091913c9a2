"""The rehearsal of a coordinator that crafts weights: what comes back without the site's check, and with it."""

from types import SimpleNamespace

import pytest
from small_audits import opened

from polyclinic.attacks.attack import LEAKS, NOT_TESTED, WITHSTOOD
from polyclinic.audits import coordinator
from polyclinic.audits.coordinator import CONTROL, Rehearsal, bounds, fish, judge, rehearse
from polyclinic.errors import BadInput

STUDY = {"audit.keep_parcels": 0, "sites.count": 2, "data.test": 0.5, "data.samples": 80}


def row(attack: str, checked: bool, found: int = 0, stopped: bool = False, failed: str = "") -> Rehearsal:
    return Rehearsal(attack, checked, stopped, found, 0, 10, None, 0.0, failed)


WORKS, STOPPED = row("a", False, 5), row("a", True, stopped=True)
FAILED = [row(CONTROL, True), WORKS, row("a", True, failed="no memory"), row("b", False, 3)]


@pytest.mark.parametrize(("rows", "word", "why"), [
    ([WORKS, STOPPED], WITHSTOOD, ""),
    ([row(CONTROL, True), WORKS, STOPPED], WITHSTOOD, ""),
    ([WORKS, row("a", True, 1)], LEAKS, ""),
    ([row("a", False), STOPPED], NOT_TESTED, ""),  # it does not work without the check either
    ([row(CONTROL, True, stopped=True), WORKS, STOPPED], NOT_TESTED, "honest weights"),
    ([*FAILED, row("b", True, stopped=True)], NOT_TESTED, "no memory"),  # a site that fails was not stopped
    ([*FAILED, row("b", True, 2)], LEAKS, ""),
])  # fmt: skip
def test_the_check_withstands_only_attacks_that_work_without_it(rows, word, why):
    found, because = judge(rows)
    assert found == word
    assert why in because


def test_crafted_weights_get_images_without_the_check_and_none_with_it(tiny, undisturbed, monkeypatch):
    monkeypatch.setattr(coordinator, "FISHED", 6)
    tools, _ = opened(undisturbed(tiny("fedavg", STUDY, rounds=1)).folder)
    found = rehearse(tools, "site-1")
    by_check = {(one["attack"], one["checked"]): one for one in found["rows"]}
    assert by_check["imprint", False]["identified"] > 0
    assert by_check["imprint", True]["stopped"]
    assert found["verdict"] == WITHSTOOD


def test_fishing_names_images_of_a_network_without_a_dense_layer(tiny, undisturbed, monkeypatch):
    monkeypatch.setattr(coordinator, "FISHED", 20)
    study = tiny("fedavg", {**STUDY, "model.backbone": "small-cnn", "model.norm": "group"}, rounds=1)
    tools, _ = opened(undisturbed(study).folder)
    found = rehearse(tools, "site-1")
    control, free, checked = found["rows"]
    assert (control["attack"], free["attack"], checked["attack"]) == (CONTROL, "fishing", "fishing")
    assert free["identified"] > 1 + free["by_chance"]  # 5 and 0 of 14
    assert checked["stopped"]
    assert not checked["identified"]
    assert found["verdict"] == WITHSTOOD


def test_bounds_of_fishing_hold_one_image_each():
    assert bounds(40) == pytest.approx([1 - (n + 0.5) / 40 for n in range(40)], abs=0.01)
    assert len(bounds(5000)) == 6
    assert bounds(2)[0] > bounds(2)[-1] > 0


def test_fishing_needs_classes(tiny):
    study = tiny("fedavg", {"task.name": "regression", "data.source": "hand-phantom"})
    with pytest.raises(BadInput, match="needs classes"):
        fish(SimpleNamespace(study=study), False)
