"""A generator that was trained on fifty images until it knew them by heart fails copies and membership."""

from __future__ import annotations

import pytest
import torch

from polyclinic.attacks.copies import find_copies
from polyclinic.attacks.membership import NearestSynthetic
from polyclinic.data.datasets.phantoms.chest import ChestPhantom
from polyclinic.generators.vqvae2.model import VQVAE2
from polyclinic.metrics.perceptual import Pixels
from polyclinic.randomness import torch_rng
from polyclinic.tasks import Target


@pytest.mark.slow
def test_an_overfitted_vqvae2_leaks():
    drawn = ChestPhantom(samples=100, size=28, seed=1).load()
    order = torch.randperm(100, generator=torch_rng("overfitted", "split"))
    images, labels = torch.from_numpy(drawn.images)[order], torch.from_numpy(drawn.labels)[order]
    settings = VQVAE2(
        width=32, code_width=8, top_codes=64, bottom_codes=64, blocks=1, epochs=150, batch_size=25,
        prior_epochs=600, prior_batch_size=25, prior_width=48, prior_layers=4, prior_dropout=0.0,
    )  # fmt: skip
    model = settings.build(channels=1, size=28, target=Target(classes=drawn.classes), seed=1)
    model.fit(images[:50], labels[:50], torch_rng("overfitted", "fit"))
    made = model.sample(labels[:50].repeat(2), torch_rng("overfitted", "sample"))
    found = find_copies(made, images[:50], images[50:])
    assert found.verdict().leak
    assert found.closer_share > 0.9
    assert NearestSynthetic().run(made, images[:50], images[50:], Pixels()).separation.auc > 0.8
