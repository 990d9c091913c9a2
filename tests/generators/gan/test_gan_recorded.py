"""A GAN's steps as a CUDA graph, on a pretended GPU: they are the same."""

from __future__ import annotations

import pytest
import torch
from pretended_gpu import pretend_gpu
from small_gans import make, rng, squares

from polyclinic.generators.gan import model as gan_model
from polyclinic.training.gpu.graphs import WARM_UP


@pytest.mark.parametrize("name", ["gan", "dcgan", "wgan-gp"])
def test_recorded_steps_are_the_same(name, monkeypatch):
    images, labels = squares(12)
    ends = []
    for recorded in (False, True):
        if recorded:
            pretend_gpu(monkeypatch)
            monkeypatch.setattr(gan_model, "steps_are_recorded", lambda parameters: True)
        made = make(name, steps=WARM_UP + 2)
        losses = made.fit(images, labels, rng())
        ends.append((losses, made.state()))
    (loss, plain), (other, found) = ends
    assert other == pytest.approx(loss)
    assert all(torch.equal(plain[name], found[name]) for name in plain)
