"""Analytic inversion in an audit: one image behind an update of a perceptron lies open; of other networks nothing."""

from __future__ import annotations

from typing import ClassVar

import pytest
from torch import nn

from polyclinic.audits.audit import audit
from polyclinic.models import BACKBONES
from polyclinic.models.backbone import Backbone


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
