"""Layers of StyleGAN2 against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from small_stylegan2 import TWO, build, rng
from torch.nn import functional as F

from polyclinic.generators.stylegan2.layers import Conv, Finish, Linear, StyledConv, blur, doubled, swept
from polyclinic.generators.stylegan2.networks import GROUP, Spread, StyleGAN2Shape, StyleGenerator

pytestmark = pytest.mark.usefixtures("same_weights")


def noise(*shape):
    return torch.randn(shape, generator=rng(1), dtype=torch.float64)


# --- layers ------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("speed", [1.0, 0.1])
def test_a_slow_layer_begins_like_a_fast_one(speed):
    layer = Linear(3, 2, bias=1.5, speed=speed, gain=2.0)
    assert layer(torch.zeros(1, 3))[0].tolist() == pytest.approx([3.0, 3.0])
    wide = Linear(400, 400, speed=speed, gain=2.0)
    assert float(wide(torch.ones(1, 400)).detach().std()) == pytest.approx(2, rel=0.15)


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
