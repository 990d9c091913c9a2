"""Gradients of a run searched for at once, beside the same searches one by one."""

from __future__ import annotations

import dataclasses

import pytest

from polyclinic.audits.attack_updates import invert_gradients
from polyclinic.audits.audit import build_tools, invert_together
from polyclinic.audits.open_run import open_run
from polyclinic.audits.parcels import parcels_to_audit
from polyclinic.errors import BadInput
from polyclinic.study.tables import EFFORTS

SEARCH = {"optimizer": "adam", "iterations": 1, "label": "joint", "start": "uniform"}


def test_together_they_end_as_one_by_one(tiny, undisturbed) -> None:
    changes = {"audit.gradient_inversion": SEARCH, "audit.keep_parcels": 9, "optimizer.batch_size": 1}
    folder = undisturbed(tiny("fedsgd", {**changes, "sites.count": 1}, rounds=2, batch="mini")).folder
    found = invert_together(folder)
    assembly, lines = open_run(folder)
    tools = build_tools(assembly, "thorough", "pixels", "cpu")
    wanted = parcels_to_audit(folder, assembly.study, lines, "thorough", ("gradients",), ())
    alone = [invert_gradients(one.seen(tools), one.truth(tools)).verdict.evidence for one in wanted]
    assert len(alone) == 2
    assert found["mse"] == pytest.approx([one["mse"] for one in alone], rel=0.02)  # an audit cuts off what is no colour
    assert found["ssim"] == pytest.approx([one["ssim"] for one in alone], abs=0.02)
    assert found["non_converging"] == [bool(one["non_converging"]) for one in alone]


def test_gradients_of_many_images_are_refused(tiny, undisturbed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EFFORTS, "thorough", dataclasses.replace(EFFORTS["thorough"], images=1))
    folder = undisturbed(tiny("fedsgd", {"audit.keep_parcels": 1}, rounds=1)).folder
    with pytest.raises(BadInput, match="one by one"):
        invert_together(folder)
