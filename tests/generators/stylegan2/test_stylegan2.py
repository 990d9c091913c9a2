"""StyleGAN2: its layers against slow and obvious ones, its regularisers and augmentation, and that it learns labels."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from polyclinic.errors import BadInput
from polyclinic.generators import GENERATORS
from polyclinic.generators.random_source import RandomSource
from polyclinic.generators.stylegan2.ada import augmented, recoloured
from polyclinic.generators.stylegan2.discriminator import GROUP, Spread
from polyclinic.generators.stylegan2.layers import Conv, Finish, Linear, StyledConv, blur, doubled, swept
from polyclinic.generators.stylegan2.model import StyleGAN2
from polyclinic.generators.stylegan2.networks import StyleGAN2Shape, StyleGenerator
from polyclinic.privacy.obstacles import mixes_samples, obstacles
from polyclinic.tasks import Target

TWO = Target(("dark", "bright"))
TINY = {"width": 2, "latent": 8, "batch_size": 8}


@pytest.fixture(autouse=True)
def _same_weights():
    """Layers made without a model draw their weights from torch's own state: the same in every run."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def build(size=28, channels=1, target=TWO, **settings):
    return StyleGAN2(**{**TINY, **settings}).build(channels=channels, size=size, target=target, seed=0)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def random(seed=0):
    return RandomSource(rng(seed), torch.device("cpu"))


def noise(*shape):
    return torch.randn(shape, generator=rng(1), dtype=torch.float64)


# --- layers ---------------------------------------------------------------------------------------------


def test_blur_is_the_filter_1_3_3_1():
    x = noise(2, 3, 8, 8)
    taps = torch.tensor([1.0, 3.0, 3.0, 1.0], dtype=torch.float64) / 8
    kernel = (taps[:, None] * taps[None]).expand(3, 1, 4, 4)
    assert torch.allclose(blur(x, 2, 1), F.conv2d(F.pad(x, (2, 1, 2, 1)), kernel, groups=3))


@pytest.mark.parametrize(("side", "before", "after"), [(8, 2, 2), (9, 1, 1), (8, 2, 1)])
def test_a_product_with_bands_is_the_filter(side, before, after):
    """What a GPU computes at large sizes; of every second pixel, where no others are wanted."""
    x = noise(2, 3, side, side)
    assert torch.allclose(swept(x, side + before + after - 3, before), blur(x, before, after))
    assert torch.allclose(swept(noise(2, 3, 8, 8), 4, 1, stride=2), blur(noise(2, 3, 8, 8), 1, 1)[..., ::2, ::2])


def test_sizes_change_by_two_and_flat_images_stay_flat():
    flat = torch.ones(1, 1, 8, 8)
    half = Conv(1, 1, 1, down=True)
    with torch.no_grad():
        half.weight.fill_(1.0)
    assert half(flat).shape == (1, 1, 4, 4)
    assert torch.allclose(half(flat)[..., 1:-1, 1:-1], torch.ones(1, 1, 2, 2))
    assert torch.allclose(doubled(flat), torch.ones(1, 1, 16, 16))


@pytest.mark.parametrize(
    ("shape", "down"), [((3, 5, 1), True), ((3, 5, 3), True), ((9, 3, 3), False), ((8, 8, 1), False)]
)
def test_a_layer_computes_on_a_gpu_what_it_computes_on_a_cpu(shape, down, monkeypatch):
    """Borders and bias included; channels are filled up there, and filters are products."""
    layer = Conv(*shape, down=down).double()
    x = noise(2, shape[0], 8, 8).requires_grad_()
    if layer.bias is not None:
        torch.nn.init.normal_(layer.bias)
    found = {}
    for gpu in (False, True):
        monkeypatch.setattr("polyclinic.generators.stylegan2.layers.uses_gpu_kernels", lambda x, gpu=gpu: gpu)
        y = layer(x)
        found[gpu] = (y, *torch.autograd.grad(y.square().sum(), (x, layer.weight)))
    for cpu, gpu in zip(found[False], found[True], strict=True):
        assert torch.allclose(cpu, gpu)


def test_factors_bias_noise_and_activation_by_hand():
    layer = Finish(2)
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([0.5, -0.5]).reshape(2, 1, 1))
        layer.amount.fill_(0.25)
    x, factors, grain = torch.randn(3, 2, 4, 4), torch.rand(3, 2, 1, 1), torch.randn(3, 1, 4, 4)
    expected = math.sqrt(2) * F.leaky_relu(x * factors + 0.25 * grain + layer.bias, 0.2)
    assert torch.allclose(layer(x, factors, grain), expected, atol=1e-6)


def test_doubling_is_the_same_filter_away_from_the_border():
    x = noise(1, 1, 6, 6)
    spread = torch.zeros(1, 1, 12, 12, dtype=torch.float64)
    spread[..., ::2, ::2] = 4 * x
    assert torch.allclose(doubled(x)[..., 2:-2, 2:-2], blur(spread, 2, 1)[..., 2:-2, 2:-2])


def test_weighting_channels_is_weighting_weights():
    """Against the paper's form: every image of the batch has weights of its own, scaled to unit length."""
    layer = StyledConv(4, 5, 3, 6).double()
    x, w = noise(3, 4, 7, 7), noise(3, 6)
    style = layer.style(w)
    expected = []
    for image, scale in zip(x, style, strict=True):
        weight = layer.weight * layer.scale * scale[None, :, None, None]
        weight = weight / (weight.square().sum((1, 2, 3), keepdim=True) + 1e-8).sqrt()
        expected.append(F.conv2d(image[None], weight, padding=1))
    made, factors = layer(x, w)
    assert torch.allclose(made * factors, torch.cat(expected), atol=1e-7)


def test_demodulation_keeps_the_variance_whatever_the_style():
    layer = StyledConv(32, 32, 3, 4)
    x = torch.randn(16, 32, 16, 16, generator=rng())
    layer.requires_grad_(False)
    for size in (0.1, 1.0, 10.0):
        made, factors = layer(x, size * torch.randn(16, 4, generator=rng(2)))
        out = made * factors
        assert 0.8 < float(out[..., 2:-2, 2:-2].var()) < 1.2


def test_an_enlarging_convolution_doubles_the_side_and_keeps_the_mean():
    layer = StyledConv(1, 1, 3, 2, up=True, demodulate=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.style.weight.zero_()
    out, _ = layer(torch.ones(1, 1, 6, 6), torch.zeros(1, 2))
    assert out.shape == (1, 1, 12, 12)
    assert torch.allclose(out[..., 3:-3, 3:-3], torch.full((1, 1, 6, 6), 9 * layer.scale), atol=1e-5)


def test_layers_learn_at_one_speed():
    wide, narrow = Linear(400, 300), Linear(4, 300)
    for layer in (wide, narrow):
        out = layer(torch.randn(2000, layer.weight.shape[1], generator=rng())).detach()
        assert 0.6 < float(out.std()) < 1.6
        assert 0.7 < float(layer.weight.detach().std()) < 1.3
    assert Conv(3, 4, 3, down=True)(torch.zeros(1, 3, 8, 8)).shape == (1, 4, 4, 4)


def test_the_spread_of_a_batch_by_hand():
    x = torch.arange(8.0).reshape(8, 1, 1, 1).expand(8, 2, 3, 3)
    plane = Spread()(x)[:, -1]
    groups = torch.arange(8.0).reshape(2, GROUP)
    assert torch.allclose(plane[:, 0, 0], groups.var(1, unbiased=False).sqrt().repeat_interleave(GROUP), atol=1e-4)


def test_real_and_made_images_judged_in_one_pass_are_judged_alone():
    model = build()
    judge = model.networks["discriminator"]
    real, made = torch.randn(8, 1, 32, 32, generator=rng()), torch.randn(8, 1, 32, 32, generator=rng(1))
    labels = torch.arange(8) % 2
    together = judge(torch.cat([made, real]), labels.repeat(2))
    assert torch.allclose(together, torch.cat([judge(made, labels), judge(real, labels)]), atol=1e-5)


def test_a_label_may_pass_through_layers_before_it_meets_an_image():
    """As in the reference implementation; written out by hand, and only the discriminator has them."""
    torch.manual_seed(0)
    model = build(label_layers=2)
    judge, images, labels = (
        model.networks["discriminator"],
        torch.randn(4, 1, 32, 32, generator=rng()),
        torch.arange(4) % 2,
    )
    known = judge.label(labels)
    known = known / (known.square().mean(1, keepdim=True) + 1e-8).sqrt()
    for layer in judge.label_layers:
        known = F.leaky_relu(F.linear(known, layer.weight * layer.scale, layer.bias * layer.offset), 0.2)
    expected = (judge.score(judge.features(images)) * known).sum(1) / math.sqrt(8)
    assert torch.allclose(judge(images, labels), expected, atol=1e-5)
    assert len(judge.label_layers) == 2
    plain = set(build().networks.state_dict())
    assert {name for name in model.networks.state_dict() if "label_layers" in name} == set(
        model.networks.state_dict()
    ) - plain


@pytest.mark.parametrize("memory", [0.998, 0.995])
def test_the_mean_style_forgets_as_fast_as_it_is_told(memory):
    mapping = build(style_memory=memory).networks["generator"].mapping
    mapping.remember(torch.ones(4, 8))
    assert torch.allclose(mapping.get_buffer("mean"), torch.full((8,), 1 - memory))


def test_every_layer_gets_its_style():
    shape = StyleGAN2Shape(1, 32, TWO, 2, 8, 2)
    network = StyleGenerator(shape)
    assert network.synthesis.layers == 8
    assert network.synthesis.noise_sides == [4, 8, 8, 16, 16, 32, 32]
    noises = [torch.zeros(1, 1, side, side) for side in network.synthesis.noise_sides]
    styles = torch.randn(1, 8, 8, generator=rng()).requires_grad_()
    network(styles, noises).sum().backward()
    assert bool((styles.grad.abs().sum(2) > 0).all())


# --- the model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "channels"), [(28, 1), (32, 3), (64, 1), (100, 1)])
def test_images_have_the_size_that_was_asked_for(size, channels):
    model = build(size, channels)
    made = model.sample(torch.tensor([0, 1, 1]), rng())
    assert (made.shape, made.dtype) == ((3, channels, size, size), torch.uint8)
    assert model.sample(torch.zeros(0, dtype=torch.long), rng()).shape == (0, channels, size, size)


def test_the_same_draws_give_the_same_bits_and_leave_torch_alone():
    images = torch.randint(0, 256, (16, 1, 28, 28), dtype=torch.uint8, generator=rng())
    labels = torch.arange(16) % 2
    states = []
    for _ in range(2):
        before = torch.random.get_rng_state()
        model = build(steps=3)
        model.fit(images, labels, rng(3))
        assert torch.equal(torch.random.get_rng_state(), before)
        states.append(model.state())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    other = build(steps=3)
    other.load(states[0])
    assert torch.equal(other.sample(labels, rng(5)), model.sample(labels, rng(5)))
    assert not torch.equal(other.sample(labels, rng(6)), model.sample(labels, rng(5)))


def test_it_learns_what_a_label_means():
    bright = torch.arange(64) % 2
    images = (60 + 130 * bright[:, None, None, None] + torch.randint(-20, 20, (64, 1, 28, 28), generator=rng())).byte()
    model = build(steps=70, width=4, lr=0.005, average_images=300, path_weight=0, style_mixing=0)
    model.fit(images, bright, rng())
    made = model.sample(bright, rng(1)).float().mean((1, 2, 3))
    assert made[bright == 1].mean() - made[bright == 0].mean() > 50


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


# --- learning -------------------------------------------------------------------------------------------


def stepping(**settings):
    model = build(**settings)
    images = torch.randint(0, 256, (16, 1, 28, 28), dtype=torch.uint8, generator=rng())
    return model.begin(images, torch.arange(16) % 2, rng())


def test_a_gpu_computes_the_same(monkeypatch):
    """Images and scores; a step with all regularisers runs (its gradients: test_stylegan2_steps.py)."""
    model, labels = build(), torch.arange(4) % 2
    w, seen = torch.randn(4, 8, generator=rng()), torch.randn(4, 1, 32, 32, generator=rng())
    judge = model.networks["discriminator"]
    here = (model.images_of(w, model.fixed_noises()), judge(seen, labels))
    monkeypatch.setattr("polyclinic.generators.stylegan2.layers.uses_gpu_kernels", lambda x: True)
    there = (model.images_of(w, model.fixed_noises()), judge(seen, labels))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(here, there, strict=True))
    steps = stepping()
    steps.step()
    assert all(bool(tensor.isfinite().all()) for tensor in steps.networks.state_dict().values())


def test_regularisers_act_now_and_then(monkeypatch):
    steps, acted = stepping(), []
    monkeypatch.setattr(steps, "_flatten", lambda *_: acted.append(("r1", steps.taken)))
    monkeypatch.setattr(steps, "_even_out", lambda *_: acted.append(("path", steps.taken)))
    for _ in range(18):
        steps.step()
    assert [at for what, at in acted if what == "r1"] == [0, 16]
    assert [at for what, at in acted if what == "path"] == [0, 4, 8, 12, 16]


def test_r1_flattens_the_discriminator_at_real_images():
    def slope(steps):
        images = next(steps.batches)[0].requires_grad_()
        (gradient,) = torch.autograd.grad(steps.discriminator(images, torch.arange(8) % 2).sum(), images)
        return float(gradient.square().sum())

    steps = stepping(gamma=100.0)
    before = slope(steps)
    for _ in range(10):
        steps._flatten(*next(steps.batches))
    assert slope(steps) < before / 2


def test_path_length_moves_towards_what_is_usual():
    steps = stepping()
    labels = torch.arange(8) % 2
    steps._even_out(labels)
    first = float(steps.controls.get_buffer("path_length"))
    assert first > 0
    for _ in range(5):
        steps._even_out(labels)
    assert float(steps.controls.get_buffer("path_length")) > first


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


# --- augmentation ---------------------------------------------------------------------------------------


def test_no_augmentation_at_the_start_and_some_of_it_later():
    images = torch.rand(200, 1, 16, 16, generator=rng()) * 2 - 1
    assert augmented(images, torch.tensor(0.0), random()) is images
    changed = {}
    for p in (0.1, 0.9):
        same = (augmented(images, torch.tensor(p), random()) - images).abs().amax((1, 2, 3)) < 1e-4
        changed[p] = 1 - float(same.double().mean())
    assert 0.2 < changed[0.1] < 0.8 < changed[0.9]


@pytest.mark.parametrize("channels", [1, 3])
def test_augmentation_has_gradients_and_changes_no_shape(channels):
    images = torch.rand(4, channels, 16, 16, generator=rng()).requires_grad_()
    seen = augmented(images, torch.tensor(1.0), random())
    assert seen.shape == images.shape
    seen.sum().backward()
    assert float(images.grad.abs().sum()) > 0


def test_colours_by_hand():
    images = torch.rand(1, 3, 2, 2)
    swap = torch.eye(4)[[1, 0, 2, 3]][None]
    assert torch.allclose(recoloured(images, swap), images[:, [1, 0, 2]])
    brighter = torch.eye(4)[None].clone()
    brighter[:, :3, 3] = 0.25
    assert torch.allclose(recoloured(images[:, :1], brighter), images[:, :1] + 0.25)
    doubled_contrast = torch.diag(torch.tensor([2.0, 2.0, 2.0, 1.0]))[None]
    assert torch.allclose(recoloured(images[:, :1], doubled_contrast), 2 * images[:, :1])


@pytest.mark.parametrize("channels", [1, 3])
def test_a_mask_behind_the_image_has_no_colour(channels):
    images, mask = torch.randn(4, channels, 8, 8, generator=rng()), torch.randn(4, 1, 8, 8, generator=rng(1))
    matrix = torch.randn(4, 4, 4, generator=rng(2))
    found = recoloured(torch.cat([images, mask], 1), matrix)
    assert torch.equal(found[:, -1:], mask)
    assert torch.equal(found[:, :-1], recoloured(images, matrix))
    both = augmented(torch.cat([images, mask], 1), torch.tensor(1.0), random())
    assert both.shape == (4, channels + 1, 8, 8)


def test_greys_stay_grey_in_colour_images():
    """Hue and saturation turn about the axis of greys."""
    grey = torch.rand(20, 1, 8, 8, generator=rng()).expand(-1, 3, -1, -1)
    seen = augmented(grey, torch.tensor(1.0), random())
    assert float((seen - seen.mean(1, keepdim=True)).abs().max()) < 1e-4


# --- settings -------------------------------------------------------------------------------------------


def test_differential_privacy_is_refused_with_the_reason_and_found_in_the_network():
    assert "compares the images of a batch" in StyleGAN2().dp_obstacle()
    model = build()
    assert any("Spread" in reason for reason in obstacles(model.networks["discriminator"]))
    judge = model.networks["discriminator"]
    assert mixes_samples(lambda_module(lambda x: judge(x, torch.zeros(len(x)))[:, None]), torch.randn(4, 1, 32, 32))
    with pytest.raises(BadInput, match="StyleGAN2's discriminator"):
        model.fit(torch.zeros(8, 1, 28, 28, dtype=torch.uint8), torch.zeros(8), rng(), private={"generator": None})


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


def test_the_registry_knows_it():
    assert GENERATORS["stylegan2"] is StyleGAN2
    assert math.isclose(StyleGAN2().lr, 0.0025)
