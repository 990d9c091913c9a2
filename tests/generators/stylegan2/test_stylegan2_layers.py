"""Layers of StyleGAN2 against their formulas."""

import math

import numpy as np
import pytest
import torch
from small_stylegan2 import build, rng
from torch.nn import functional as F

from polyclinic.generators.stylegan2.layers import Conv, Finish, Linear, StyledConv, blur, doubled, swept
from polyclinic.generators.stylegan2.networks import GROUP, Spread
from polyclinic.generators.stylegan2.training import _colours, _moves, augmented, recoloured

pytestmark = pytest.mark.usefixtures("same_weights")


def noise(*shape):
    return torch.randn(shape, generator=rng(1), dtype=torch.float64)


def test_blur_is_the_filter_1_3_3_1_and_doubling_the_same_away_from_the_border():
    x = noise(2, 3, 8, 8)
    taps = torch.tensor([1.0, 3.0, 3.0, 1.0], dtype=torch.float64) / 8
    kernel = (taps[:, None] * taps[None]).expand(3, 1, 4, 4)
    assert torch.allclose(blur(x, 2, 1), F.conv2d(F.pad(x, (2, 1, 2, 1)), kernel, groups=3))
    x = noise(1, 1, 6, 6)
    spread = torch.zeros(1, 1, 12, 12, dtype=torch.float64)
    spread[..., ::2, ::2] = 4 * x
    assert torch.allclose(doubled(x)[..., 2:-2, 2:-2], blur(spread, 2, 1)[..., 2:-2, 2:-2])


@pytest.mark.parametrize(("side", "before", "after"), [(8, 2, 2), (9, 1, 1), (8, 2, 1)])
def test_a_product_with_bands_is_the_filter(side, before, after):
    """What a GPU computes at large sizes; of every second pixel, where no others are wanted."""
    x = noise(2, 3, side, side)
    assert torch.allclose(swept(x, side + before + after - 3, before), blur(x, before, after))
    assert torch.allclose(swept(noise(2, 3, 8, 8), 4, 1, stride=2), blur(noise(2, 3, 8, 8), 1, 1)[..., ::2, ::2])


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


def test_factors_bias_noise_activation_and_the_spread_of_a_batch_by_hand():
    layer = Finish(2)
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([0.5, -0.5]).reshape(2, 1, 1))
        layer.amount.fill_(0.25)
    x, factors, grain = torch.randn(3, 2, 4, 4), torch.rand(3, 2, 1, 1), torch.randn(3, 1, 4, 4)
    expected = math.sqrt(2) * F.leaky_relu(x * factors + 0.25 * grain + layer.bias, 0.2)
    assert torch.allclose(layer(x, factors, grain), expected, atol=1e-6)
    x = torch.arange(8.0).reshape(8, 1, 1, 1).expand(8, 2, 3, 3)
    plane = Spread()(x)[:, -1]
    groups = torch.arange(8.0).reshape(2, GROUP)
    assert torch.allclose(plane[:, 0, 0], groups.var(1, unbiased=False).sqrt().repeat_interleave(GROUP), atol=1e-4)


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


@pytest.mark.parametrize("speed", [1.0, 0.1])
def test_a_slow_layer_begins_like_a_fast_one(speed):
    layer = Linear(3, 2, bias=1.5, speed=speed, gain=2.0)
    assert layer(torch.zeros(1, 3))[0].tolist() == pytest.approx([3.0, 3.0])
    wide = Linear(400, 400, speed=speed, gain=2.0)
    assert float(wide(torch.ones(1, 400)).detach().std()) == pytest.approx(2, rel=0.15)


def test_a_label_may_pass_through_layers_before_it_meets_an_image():
    """As in the reference implementation; written out by hand, and only the discriminator has them."""
    torch.manual_seed(0)
    model = build(label_layers=2)
    judge, labels = model.networks["discriminator"], torch.arange(4) % 2
    images = torch.randn(4, 1, 32, 32, generator=rng())
    known = judge.label(labels)
    known = known / (known.square().mean(1, keepdim=True) + 1e-8).sqrt()
    for layer in judge.label_layers:
        known = F.leaky_relu(F.linear(known, layer.weight * layer.scale, layer.bias * layer.offset), 0.2)
    expected = (judge.score(judge.features(images)) * known).sum(1) / math.sqrt(8)
    assert torch.allclose(judge(images, labels), expected, atol=1e-5)
    assert len(judge.label_layers) == 2
    names = set(model.networks.state_dict())
    assert {name for name in names if "label_layers" in name} == names - set(build().networks.state_dict())


@pytest.mark.parametrize("memory", [0.998, 0.995])
def test_the_mean_style_forgets_as_fast_as_it_is_told(memory):
    mapping = build(style_memory=memory).networks["generator"].mapping
    mapping.remember(torch.ones(4, 8))
    assert torch.allclose(mapping.get_buffer("mean"), torch.full((8,), 1 - memory))


class Known:
    """All draws of a kind are one number."""

    device = torch.device("cpu")

    def __init__(self, normal, uniform, integer):
        self.numbers = {"normal": float(normal), "uniform": float(uniform), "integer": int(integer)}
        self.bounds = []

    def normal(self, *shape):
        return torch.full(shape, self.numbers["normal"])

    def uniform(self, *shape):
        return torch.full(shape, self.numbers["uniform"])

    def integers(self, bound, *shape):
        self.bounds.append(bound)
        return torch.full(shape, self.numbers["integer"])


def scaled(x, y):
    return np.diag([x, y, 1.0])


def turned(quarters):
    cos, sin = math.cos(quarters * math.pi / 2), math.sin(quarters * math.pi / 2)
    return np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])


def moved(x, y):
    return np.array([[1, 0, x], [0, 1, y], [0, 0, 1.0]])


def test_all_moves_by_hand():
    """Flip, quarter turn, two of 32 pixels, larger by 2^0.2, a turn, stretched, a turn, a quarter of half a side."""
    known = Known(normal=1, uniform=0.75, integer=1)
    [found] = _moves(torch.zeros(1, 1, 32, 32), torch.tensor(1.0), known)
    assert known.bounds == [2, 4], "flipped or not; turned by none to three quarters"
    size = 2**0.2
    wanted = scaled(-1, 1) @ turned(1) @ moved(0.125, 0.125) @ scaled(size, size) @ turned(1)
    wanted = wanted @ scaled(size, 1 / size) @ turned(1) @ moved(0.25, 0.25)
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-5)
    [found] = _moves(torch.zeros(1, 1, 32, 32), torch.tensor(1.0), Known(normal=0, uniform=0.55, integer=0))
    turn = turned(0.2)
    np.testing.assert_allclose(found.numpy(), turn @ turn, atol=1e-5)  # 0.1 * 0.125 of a side is less than a pixel
    # With p = 1/2 each turn has 1 - sqrt(1/2) = 0.29: a draw of 0.4 makes all changes but turns by any angle.
    [found] = _moves(torch.zeros(1, 1, 32, 32), torch.tensor(0.5), Known(normal=0, uniform=0.4, integer=1))
    shift = round(-0.2 * 0.125 * 32) * 2 / 32
    np.testing.assert_allclose(found.numpy(), scaled(-1, 1) @ turned(1) @ moved(shift, shift), atol=1e-5)
    [found] = _moves(torch.zeros(1, 1, 32, 32), torch.tensor(0.5), Known(normal=1, uniform=0.6, integer=1))
    np.testing.assert_allclose(found.numpy(), np.eye(3), atol=1e-6)


def test_all_colours_by_hand_and_grey_has_no_hue_and_no_saturation():
    """Brighter by 0.2, contrast 2^0.5, luma inverted, a quarter turn of hue, twice the saturation."""
    known = Known(normal=1, uniform=0.75, integer=1)
    [found] = _colours(torch.zeros(1, 3, 4, 4), torch.tensor(1.0), known).numpy()
    assert known.bounds == [2]
    grey = found @ [0.3, 0.3, 0.3, 1]
    np.testing.assert_allclose(grey, [*[-math.sqrt(2) * 0.5] * 3, 1], atol=1e-5)
    hue = found @ [1, -1, 0, 0]  # a quarter turn about the axis of greys
    np.testing.assert_allclose(hue, [*(2 * math.sqrt(2 / 3) * np.array([1, 1, -2])), 0], atol=1e-5)
    for channels in (1, 2):
        [found] = _colours(torch.zeros(1, channels, 4, 4), torch.tensor(1.0), Known(normal=1, uniform=0.75, integer=0))
        wanted = math.sqrt(2) * np.eye(4)[:3] + np.sqrt(2) * 0.2 * np.eye(4)[3]
        np.testing.assert_allclose(found.numpy(), [*wanted, [0, 0, 0, 1]], atol=1e-5)


def test_a_mask_stays_and_grey_takes_the_mean_of_the_colours():
    matrix = torch.tensor([[[1.0, 2, 3, 0.1], [0, 1, 0, 0.2], [0, 0, 1, 0.3], [0, 0, 0, 1]]])
    images = torch.rand(1, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    colour = recoloured(images, matrix)
    torch.testing.assert_close(colour[:, 3], images[:, 3])
    torch.testing.assert_close(colour[0, 0], images[0, 0] + 2 * images[0, 1] + 3 * images[0, 2] + 0.1)
    torch.testing.assert_close(colour[0, 2], images[0, 2] + 0.3)
    grey = recoloured(images[:, :2], matrix)
    torch.testing.assert_close(grey[:, 1], images[:, 1])
    torch.testing.assert_close(grey[:, 0], images[:, 0] * (6 + 1 + 1) / 3 + 0.2)


@pytest.mark.parametrize(("p", "changed"), [(0.0, False), (1.0, True)])
def test_nothing_happens_without_a_chance(p, changed):
    images = torch.linspace(-1, 1, 64).reshape(1, 1, 8, 8)
    found = augmented(images, torch.tensor(p), Known(normal=0, uniform=0.5, integer=1))
    assert torch.equal(found, images) is not changed
    if changed:  # flipped, a quarter turned, and with inverted luma
        torch.testing.assert_close(found[0, 0], -images[0, 0].T, atol=1e-4, rtol=0)
