"""The threat model of gradient inversion: what the attacker has, and that the truth is not used."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from inverted import knowledge
from pydantic import ValidationError
from torch import nn

from polyclinic.attacks.gradient_inversion.initialisation import draw
from polyclinic.attacks.gradient_inversion.networks import LeNet, with_random_weights
from polyclinic.attacks.gradient_inversion.settings import GradientInversion
from polyclinic.attacks.gradient_inversion.simulation import LocalTraining, cross_entropy
from polyclinic.errors import BadInput
from polyclinic.randomness import torch_rng

# --- the threat model --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "known", "says"),
    [
        ({"label": "known"}, {}, "Knowledge.labels"),
        ({"start": "given"}, {}, "Knowledge.start_images"),
        ({"kind": "weights"}, {}, "Knowledge.training"),
        ({"label": "sign"}, {"batch_size": 2}, "counts"),
        ({}, {"classes": None}, "Knowledge.classes"),
        ({"label": "counts"}, {"loss": cross_entropy}, "reads classes"),
        ({"kind": "weights"}, {"training": LocalTraining(0.1)}, "parcels of kind 'gradients'"),
        ({}, {"model": nn.Linear(2, 2)}, "no parameter of the network"),
        ({}, {"model": LeNet(3, 5, 16)}, "other shapes"),
    ],
)
def test_bad_knowledge_is_named(one_image_each, settings, known, says):
    model, _, _, parcels = one_image_each
    given = dataclasses.replace(knowledge(model), **known)
    with pytest.raises(BadInput, match=says):
        GradientInversion(**settings).run(parcels[:1], given)


@pytest.mark.parametrize("settings", [{"distance": "gaussian"}, {"variance": 3.0}, {"box": True}, {"signed": True}])
def test_contradictions_are_refused(settings):
    with pytest.raises(ValidationError):
        GradientInversion(**settings)


@pytest.mark.parametrize("scheme", ["uniform", "transformed-gaussian"])
def test_starts_are_scaled_by_image_or_by_channel(scheme):
    by_image, by_channel = (
        draw(scheme, 2, (3, 4, 4), torch_rng("scaling"), scaling) for scaling in ("image", "channel")
    )
    for found, dims in ((by_image, (1, 2, 3)), (by_channel, (2, 3))):
        assert bool((found.amin(dims) == 0).all())
        assert bool((found.amax(dims) == 1).all())
    assert not bool((by_image.amax((2, 3)) == 1).all())
    for a, b in zip(by_image.flatten(0, 1), by_channel.flatten(0, 1), strict=True):  # the same draws, stretched
        torch.testing.assert_close((a - a.min()) / (a.max() - a.min()), b)


def test_each_parcel_with_a_network_of_its_own(smooth_images, sent):
    """All at once against one after the other; labels are counted with each parcel's own network."""
    models = [with_random_weights(LeNet(1, 5, 16), torch_rng("own", i)) for i in range(3)]
    images, labels = smooth_images(6).unflatten(0, (3, 2)), torch.tensor([[0, 1], [2, 2], [3, 4]])
    parcels = [sent(m, images[i : i + 1], labels[i : i + 1])[0] for i, m in enumerate(models)]
    attack = GradientInversion(label="counts", optimizer="adam", lr=0.1, iterations=5, precision="fp64")
    together = attack.run(parcels, knowledge(models, batch_size=2))
    for i, model in enumerate(models):
        alone = attack.run(parcels[i : i + 1], knowledge(model, batch_size=2))
        torch.testing.assert_close(together.images[i : i + 1], alone.images, rtol=1e-6, atol=1e-8)
        assert together.labels[i].tolist() == alone.labels[0].tolist() == labels[i].tolist()


def test_networks_and_parcels_must_be_as_many(one_image_each):
    model, _, _, parcels = one_image_each
    with pytest.raises(BadInput, match="2 networks, and there are 8 parcels"):
        GradientInversion().run(parcels, knowledge([model, model]))
    with pytest.raises(BadInput, match="empty list"):
        GradientInversion().run(parcels, knowledge([]))


def test_trajectory_with_adam(one_image_each):
    """At each kept step: the same as a search that ends there; the distance is the loss without roughness."""
    model, _, _, parcels = one_image_each
    settings = {"optimizer": "adam", "lr": 0.1, "returns": "last", "total_variation": 0.1, "label": "sign"}
    found = GradientInversion(**settings, iterations=6, trajectory=(0, 2, 6)).run(parcels[:2], knowledge(model))
    kept = found.trajectory
    assert kept is not None
    assert kept.steps == (0, 2, 6)
    assert torch.equal(kept.images[:, 0], found.start)
    short = GradientInversion(**settings, iterations=2).run(parcels[:2], knowledge(model))
    torch.testing.assert_close(kept.images[:, 1], short.images)
    torch.testing.assert_close(kept.loss[:, 1], short.loss)
    assert torch.equal(kept.images[:, 2], found.images)
    assert torch.equal(kept.loss[:, 2], found.loss)
    images = kept.images[:, 2]
    rough = (images.diff(dim=-1).abs().flatten(1).mean(1) + images.diff(dim=-2).abs().flatten(1).mean(1)) * 0.1
    torch.testing.assert_close(kept.distance[:, 2], kept.loss[:, 2] - rough)


@pytest.mark.slow
def test_trajectory_with_lbfgs_stands_still_at_the_end(one_image_each):
    """Targets finish at steps of their own; the kept steps of the one that finishes first end with its result."""
    model, _, _, parcels = one_image_each
    settings = {"lr": 1.0, "start": "normal", "returns": "last"}
    found = GradientInversion(**settings, iterations=60, trajectory=(0, 3, 59, 60)).run(parcels, knowledge(model))
    short = GradientInversion(**settings, iterations=3).run(parcels, knowledge(model))
    kept = found.trajectory
    assert kept is not None
    assert kept.loss.shape == (8, 4)
    near = short.loss < 1  # the others have run away, where a last bit decides
    assert int(near.sum()) >= 2
    torch.testing.assert_close(kept.images[near, 1], short.images[near], rtol=1e-3, atol=1e-3)
    assert bool(found.converged.any())
    done = found.converged
    assert torch.equal(kept.images[done, 3], found.images[done])
    assert bool((kept.loss[near, 0] > kept.loss[near, 1]).all())


def test_trajectory_of_the_better_restart(one_image_each):
    model, _, _, parcels = one_image_each
    attack = GradientInversion(lr=1.0, iterations=3, restarts=3, returns="last", trajectory=(0, 3), at_once=3)
    found = attack.run(parcels[:2], knowledge(model))
    assert torch.equal(found.trajectory.images[:, 1], found.images)
    assert torch.equal(found.trajectory.images[:, 0], found.start)


@pytest.mark.parametrize("steps", [(3, 2), (-1, 2), (2, 2), (0, 101)])
def test_steps_of_a_trajectory_must_make_sense(steps):
    with pytest.raises(ValidationError, match="trajectory"):
        GradientInversion(trajectory=steps)
