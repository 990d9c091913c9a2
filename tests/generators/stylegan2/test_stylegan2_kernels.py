"""The Triton kernels of StyleGAN2 against the plain layers: on a GPU, or with TRITON_INTERPRET=1 on a CPU."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")
from polyclinic.generators.stylegan2 import kernels, layers

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="needs a GPU, or TRITON_INTERPRET=1 before the start"
)


@pytest.fixture(autouse=True)
def _gpu_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "uses_gpu_kernels", lambda x: True)
    monkeypatch.setattr(kernels, "usable", lambda x: kernels._WANTED.get())
    monkeypatch.setattr(kernels, "filters_are_usable", lambda x: kernels._WANTED.get())


def gradients(layer: nn.Module, inputs: list[Tensor], weights: Tensor) -> list[Tensor]:
    for one in inputs:
        one.requires_grad_()
    made = layer(*inputs)
    return [made, *torch.autograd.grad((made * weights).sum(), [*inputs, *layer.parameters()])]


def second_derivatives(layer: nn.Module, inputs: list[Tensor], weights: Tensor) -> list[Tensor]:
    """Of the squared gradients, as regularisers take them: w.r.t. the first inputs, then all parameters."""
    ends = [*inputs, weights.clone(), *layer.parameters()]
    for one in ends:
        one.requires_grad_()
    found = torch.autograd.grad((layer(*inputs) * ends[len(inputs)]).sum(), inputs, create_graph=True)
    penalty = sum(
        (one.square() * torch.linspace(0.5, 1.5, one.numel(), device=DEVICE).view_as(one)).sum() for one in found
    )
    made = torch.autograd.grad(penalty, ends, allow_unused=True)
    return [torch.zeros_like(end) if one is None else one for one, end in zip(made, ends, strict=True)]


def same(layer: nn.Module, *shapes: tuple[int, ...], gives: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = layer.to(DEVICE)
    for one in layer.parameters():
        nn.init.normal_(one)
    inputs, weights = [torch.randn(shape, device=DEVICE) for shape in shapes], torch.randn(gives, device=DEVICE)
    for derivatives in (gradients, second_derivatives):
        plain = derivatives(layer, inputs, weights)
        with kernels.fused():
            fused = derivatives(layer, inputs, weights)
        for one, other in zip(plain, fused, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3 * float(one.detach().abs().max()))


def test_what_follows_a_styled_convolution_is_the_same() -> None:
    same(layers.Finish(10), (3, 10, 7, 7), (3, 10, 1, 1), (3, 1, 7, 7), gives=(3, 10, 7, 7))


class Weighted(nn.Module):
    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        return layers.weighted(x, factors)


def test_weighted_channels_are_the_same() -> None:
    same(Weighted(), (2, 70, 9, 9), (2, 70), gives=(2, 70, 9, 9))


class Active(nn.Module):
    def __init__(self, *, down: bool) -> None:
        super().__init__()
        self.conv = layers.Conv(8, 16, 3, down=down, gain=1.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv.active(x)


@pytest.mark.parametrize("down", [False, True])
def test_a_convolution_with_bias_and_activation_is_the_same(down: bool) -> None:
    side = 9 if down else 18
    same(Active(down=down), (2, 8, 18, 18), gives=(2, 16, side, side))


class Swept(nn.Module):
    def __init__(self, side: int, before: int, stride: int) -> None:
        super().__init__()
        self.arguments = side, before, stride

    def forward(self, x: Tensor) -> Tensor:
        return layers.swept(x, *self.arguments)


@pytest.mark.parametrize(("inputs", "side", "before", "stride"), [(21, 20, 1, 1), (20, 21, 2, 1), (20, 10, 1, 2)])
def test_filters_are_the_same(inputs: int, side: int, before: int, stride: int) -> None:
    same(Swept(side, before, stride), (2, 5, inputs, inputs), gives=(2, 5, side, side))


def test_without_the_wish_for_them_layers_are_plain() -> None:
    assert not kernels._WANTED.get()
    with kernels.fused():
        assert kernels._WANTED.get()
    assert not kernels._WANTED.get()


@pytest.mark.parametrize(("codes", "width"), [(100, 16), (64, 32)])
def test_the_nearest_code_is_the_same(codes: int, width: int) -> None:
    from polyclinic.generators.vqvae2 import triton_kernels

    torch.manual_seed(0)
    rows, vectors = torch.randn(150, width, device=DEVICE), torch.randn(codes, width, device=DEVICE)
    found = triton_kernels.nearest(rows, vectors, vectors.square().sum(1))
    assert torch.equal(found, torch.cdist(rows, vectors).argmin(1))


class Biased(nn.Module):
    """A convolution of VQ-VAE-2 with bias and ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        from polyclinic.generators.vqvae2 import autoencoder

        return autoencoder.biased(self.conv, x, active=True)


@pytest.mark.parametrize("channels", [12, 64])
def test_a_convolution_with_bias_and_relu_is_the_same(channels: int) -> None:
    same(Biased(channels), (2, 8, 9, 9), gives=(2, channels, 9, 9))
