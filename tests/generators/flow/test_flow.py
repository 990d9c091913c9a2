"""Flow: the contract of generators, what it learns, training in parts, labels, private steps."""

import pytest
import torch

from polyclinic import testing
from polyclinic.errors import BadInput
from polyclinic.generators import Flow
from polyclinic.generators.base import FitOptions
from polyclinic.generators.flow.networks import changed
from polyclinic.generators.gan.model import GANModel
from polyclinic.randomness import torch_rng
from polyclinic.tasks import Target

VALUES, CLASSES = Target(label_range=(0.0, 200.0)), Target(classes=("no", "yes"))
TINY = {"steps": 4, "batch_size": 4, "width": 8, "levels": 2, "blocks": 1, "sample_steps": 2}


@pytest.mark.parametrize("space", ["pixels", "latents"])
def test_the_contract_of_generators(space):
    testing.check_generator(Flow(**TINY, space=space), size=30)


def vectors(settings, steps=400):
    """A flow of vectors, half of whose numbers follow the label: 150 for the upper half of the range, else 100."""
    settings = Flow(steps=steps, batch_size=32, width=8, lr=3e-3, average=0.98, **settings)
    labels = 200 * torch.rand(256, generator=torch_rng("labels"))
    rows = 125 + 25 * (labels > 100).float()[:, None].repeat(1, 8).mul(2).sub(1)
    rows[:, 4:] = 125 + 10 * torch.randn(256, 4, generator=torch_rng("rows"))
    images = rows.round().clamp(0, 255).to(torch.uint8)[:, :, None, None]
    return settings.build(channels=8, size=1, target=VALUES, seed=0), images, labels


def test_samples_have_the_value_that_was_asked_for():
    model, images, labels = vectors({})
    model.fit(images, labels, torch_rng("fit"))
    low, high = (model.sample(torch.full((64,), age), torch_rng(age)).float() for age in (30.0, 170.0))
    assert abs(low[:, :4].mean() - 100) < 6
    assert abs(high[:, :4].mean() - 150) < 6
    assert abs(high[:, 4:].mean() - 125) < 6
    assert 6 < high[:, 4:].std() < 16


def test_parts_of_training_end_in_the_same_bits_after_a_restart():
    def trained(restarted):
        model, images, labels = vectors({}, steps=9)
        kept: dict = {}
        for leg in (1, 2, 3):
            model.fit(images, labels, torch_rng("fit", leg), FitOptions(leg=(leg, 3), kept=kept))
            if restarted:
                state, (model, *_) = model.state(), vectors({}, steps=9)
                model.load(state)
                kept = {name: tensor.clone() for name, tensor in kept.items()}
        return model.state(), kept

    (one, moments), (other, _) = trained(False), trained(True)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert moments["0/step"] == 9


def test_augmentation_mirrors_and_says_so():
    images = torch.rand(64, 1, 16, 16, generator=torch_rng("images"))
    draws = torch.full((64, 6), 0.5)
    draws[:, 0] = torch.arange(64) % 2  # below a half: mirrored
    draws[:32, 5] = 0.0  # stays as it is
    made, how = changed(images, draws)
    torch.testing.assert_close(made[:32], images[:32])
    torch.testing.assert_close(made[32::2], images[32::2].flip(-1))
    torch.testing.assert_close(made[33::2], images[33::2])
    assert how[:32].abs().sum() == 0
    assert (how[32:, 0] == torch.tensor([1.0, 0.0]).repeat(16)).all()


def test_an_image_learned_by_heart_has_a_lower_loss():
    model, images, labels = vectors({})
    model.fit(images[:4], labels[:4], torch_rng("fit"))
    losses = model.losses(images[:8], labels[:8], torch_rng("losses"))
    assert losses.shape == (8, 4)
    assert (losses[:4, 0] < losses[4:, 0].min()).all()


def test_only_vectors_are_learned_privately():
    assert "features" in Flow().dp_obstacle()
    assert Flow(space="features").dp_obstacle() is None
    model = Flow(**TINY).build(channels=1, size=28, target=CLASSES, seed=0)
    images, labels = torch.zeros(4, 1, 28, 28, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(BadInput, match="encoder"):
        model.fit(images, labels, torch_rng(0), FitOptions(private={"generator": lambda *_: None}))
    assert not isinstance(model, GANModel)
    assert bool(model.fit(images[:1], labels[:1], torch_rng(0)))
