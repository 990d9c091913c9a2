"""StyleGAN2: its layers against slow and obvious ones, its regularisers and augmentation, and that it learns labels."""

import pytest
import torch
from small_stylegan2 import build, rng

from polyclinic.errors import BadInput
from polyclinic.generators.base import FitOptions
from polyclinic.generators.stylegan2.model import StyleGAN2
from polyclinic.privacy.dp_sgd import mixes_samples, obstacles
from polyclinic.tasks import Target

pytestmark = pytest.mark.usefixtures("same_weights")


@pytest.mark.parametrize(("size", "channels"), [(28, 1), (32, 3), (64, 1), (100, 1)])
def test_images_have_the_size_that_was_asked_for(size, channels):
    model = build(size, channels)
    made = model.sample(torch.tensor([0, 1, 1]), rng())
    assert (made.shape, made.dtype) == ((3, channels, size, size), torch.uint8)
    assert model.sample(torch.zeros(0, dtype=torch.long), rng()).shape == (0, channels, size, size)


@pytest.mark.parametrize(("size", "inner"), [(28, 32), (32, 32), (33, 64), (64, 64), (65, 128), (256, 256)])
def test_inside_a_side_is_a_power_of_two(size, inner):
    assert StyleGAN2().shape(1, size, Target()).size == inner


def test_samples_come_from_the_average_and_truncation_moves_them_to_the_mean():
    model = build(steps=20)
    images = torch.randint(0, 256, (16, 1, 28, 28), dtype=torch.uint8, generator=rng())
    model.fit(images, torch.arange(16) % 2, rng())
    state = model.state()
    moved = [name for name in state if name.startswith("generator.") and state[name].numel() > 1]
    assert any(not torch.equal(state[name], state["average." + name.removeprefix("generator.")]) for name in moved)
    w = torch.randn(4, 8, generator=rng())
    mean = model.average.mapping.get_buffer("mean")
    assert float(mean.abs().sum()) > 0
    assert torch.allclose(model.average.truncated(w, 0.0), mean.expand(4, -1))
    assert torch.equal(model.average.truncated(w, 1.0), w)


def test_frozen_noise_makes_the_same_image_from_the_same_style():
    model = build()
    w = torch.randn(2, 8, generator=rng()).requires_grad_()
    first, second = (model.images_of(w, model.fixed_noises()) for _ in range(2))
    assert torch.equal(first, second)
    first.sum().backward()
    assert float(w.grad.abs().sum()) > 0


def test_values_and_no_labels_work_as_labels_do():
    for target in (Target((), "years", (20.0, 80.0)), Target()):
        model = build(target=target, steps=2)
        images = torch.randint(0, 256, (8, 1, 28, 28), dtype=torch.uint8)
        model.fit(images, torch.linspace(20, 80, 8), rng())
        assert model.sample(torch.tensor([30.0]), rng()).shape == (1, 1, 28, 28)


def test_replayed_images_join_every_batch():
    images = torch.zeros(8, 1, 28, 28, dtype=torch.uint8)
    model = build()
    stream = iter([(torch.ones(4, 1, 28, 28), torch.ones(4, dtype=torch.long))])
    steps = model.begin(images, torch.zeros(8, dtype=torch.long), rng(), replayed=stream)
    real, labels = next(steps.batches)
    assert real.shape == (12, 1, 32, 32)
    assert labels.tolist() == [0] * 8 + [1] * 4
    assert (float(real[:8].max()), float(real[8:].min())) == (-1.0, 1.0)


def stepping(**settings):
    model = build(**settings)
    images = torch.randint(0, 256, (16, 1, 28, 28), dtype=torch.uint8, generator=rng())
    return model.begin(images, torch.arange(16) % 2, rng())


def test_gamma_follows_the_sizes_unless_it_is_given():
    assert stepping().gamma(8) == pytest.approx(0.0002 * 32**2 / 8)
    assert stepping(gamma=3.0).gamma(8) == 3.0


@pytest.mark.parametrize(("sign", "start", "expected"), [(1.0, 0.0, 0.16), (-1.0, 0.2, 0.04), (-1.0, 0.0, 0.0)])
def test_ada_augments_more_where_the_discriminator_is_too_sure(sign, start, expected):
    steps = stepping(ada_images=200)
    steps.p.fill_(start)
    steps._sure.fill_(4 * sign)
    steps._adapt(8)
    assert float(steps.p) == pytest.approx(expected)  # 4 steps of 8 images are 16 % of 200
    assert float(steps.controls.get_buffer("p")) == pytest.approx(expected)
    assert float(steps.controls.get_buffer("sure")) == pytest.approx(sign)


def test_an_extra_loss_reaches_the_generator():
    steps = stepping(path_weight=0)
    seen = []

    def extra(real, made):
        assert made.requires_grad
        seen.extend((real, made.detach()))
        return 1000 * made.mean()  # darker

    before = float(steps.make(torch.zeros(8, dtype=torch.long)).mean())
    for _ in range(10):
        steps.step(extra)
    assert float(steps.make(torch.zeros(8, dtype=torch.long)).mean()) < before - 0.1
    assert all(0 <= float(images.min()) <= float(images.max()) <= 1 for images in seen)


def test_differential_privacy_is_refused_with_the_reason_and_found_in_the_network():
    assert "compares the images of a batch" in StyleGAN2().dp_obstacle()
    model = build()
    assert any("Spread" in reason for reason in obstacles(model.networks["discriminator"]))
    judge = model.networks["discriminator"]
    assert mixes_samples(lambda_module(lambda x: judge(x, torch.zeros(len(x)))[:, None]), torch.randn(4, 1, 32, 32))
    with pytest.raises(BadInput, match="StyleGAN2's discriminator"):
        model.fit(
            torch.zeros(8, 1, 28, 28, dtype=torch.uint8), torch.zeros(8), rng(), FitOptions(private={"generator": None})
        )


def lambda_module(function):
    class Module(torch.nn.Module):
        def forward(self, x):
            return function(x)

    return Module()


def test_bad_images_are_refused():
    with pytest.raises(BadInput, match="up to 1024 px"):
        build(2000)
    with pytest.raises(BadInput, match="labels run from"):
        build(steps=1).fit(torch.zeros(8, 1, 28, 28, dtype=torch.uint8), torch.full((8,), 5), rng())
