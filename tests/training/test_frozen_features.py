"""Frozen layers: what they give is computed once, and training on it is training on the images."""

from __future__ import annotations

import pytest
import torch

from polyclinic.methods import METHODS
from polyclinic.models import build
from polyclinic.models.encoders import Encoder, kept_features
from polyclinic.runner.run import run
from polyclinic.study import parse_study
from polyclinic.training.frozen_features import FrozenFront, identity_of

TABLES = {
    "data": {"source": "fundus-phantom", "size": 28, "samples": 40, "validation": 0.2, "test": 0.2},
    "sites": {"partition": "iid", "count": 2},
    "model": {"backbone": "small-cnn", "freeze": "conv2"},
    "optimizer": {"lr": 0.05, "batch_size": 8},
    "engine": {"workers": 1, "device": "cpu"},
}


def frozen_run(folder, method, monkeypatch, *, kept: bool):
    """A run, and how many batches of images went through the frozen layers."""
    counted = []
    of_batch = Encoder._of_batch
    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "_of_batch", lambda self, images: counted.append(1) or of_batch(self, images))
        if not kept:
            kind = type(parse_study({**TABLES, "method": {"name": method}}).method)
            patch.setattr(kind, "traits", kind.traits.__class__(takes_frozen_features=False))
        study = parse_study({**TABLES, "method": {"name": method, "rounds": 3}})
        return run(study, folder / str(kept), cache=folder / f"cache-{kept}"), len(counted)


@pytest.mark.parametrize("method", ["fedavg", "cwt"])
def test_three_rounds_cost_one_pass_and_give_the_same_model(tmp_path, monkeypatch, method):
    kept, passes = frozen_run(tmp_path, method, monkeypatch, kept=True)
    plain, none = frozen_run(tmp_path, method, monkeypatch, kept=False)
    # two sites; training, validation and test images, a batch each; the last two once more, for the cases that are kept
    assert passes == 2 * 3 + 2 * 2
    assert none == 0
    found, wanted = kept.weights(), plain.weights()
    assert all(torch.allclose(found[name], wanted[name], atol=1e-4) for name in wanted)
    assert kept.metrics["test"] == pytest.approx(plain.metrics["test"], abs=1e-3)


def test_other_weights_have_another_identity():
    front = build("small-cnn", channels=1, outputs=2, size=28, freeze="conv1")
    before = identity_of(front, torch.device("cpu"))
    assert before == identity_of(front, torch.device("cpu"))
    with torch.no_grad():
        front.conv1.weight.add_(1e-3)
    assert identity_of(front, torch.device("cpu")) != before


def test_features_of_an_image_do_not_depend_on_others(tmp_path):
    model = build("small-cnn", channels=1, outputs=2, size=28, freeze="conv1").train()
    front = FrozenFront(model, torch.device("cpu"), (1, 28, 28))
    images = torch.randint(0, 256, (5, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(front.features(images)[3:4], front.features(images[3:4]))
    nothing = kept_features(front, images[:0].numpy(), tmp_path)  # of a site without test images
    assert nothing.shape == (0, *front.features(images).shape[1:])
    assert kept_features(front, images[:0].numpy(), tmp_path).shape == nothing.shape  # out of the file


def test_methods_that_need_images_do_not_take_features():
    without = {"cwt-replay", "fedavg-replay", "fedreplay", "feder", "felicia", "splitnn", "moon"}
    assert not any(METHODS[name].traits.takes_frozen_features for name in without - {"cwt-replay", "fedavg-replay"})
