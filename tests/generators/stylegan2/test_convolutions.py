"""Convolutions: PyTorch's to the last bit, and all derivatives that regularisers take of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.generators.stylegan2.convolutions import convolve

#: side, kernel, stride, padding, transposed: those of StyleGAN2's layers, and sides that a stride does not divide
CASES = [
    (6, 3, 1, 1, False),
    (7, 3, 2, 0, False),
    (8, 3, 2, 0, False),
    (9, 3, 2, 1, False),
    (8, 1, 2, 0, False),
    (6, 3, 2, 0, True),
    (5, 3, 2, 1, True),
]


@pytest.mark.parametrize(("side", "kernel", "stride", "padding", "transposed"), CASES)
def test_first_and_second_derivatives(side: int, kernel: int, stride: int, padding: int, transposed: bool) -> None:
    rng = torch.Generator().manual_seed(side)
    x = torch.randn(2, 3, side, side, dtype=torch.float64, generator=rng, requires_grad=True)
    shape = (3, 4, kernel, kernel) if transposed else (4, 3, kernel, kernel)
    weight = torch.randn(shape, dtype=torch.float64, generator=rng, requires_grad=True)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return convolve(x, weight, stride=stride, padding=padding, transposed=transposed)

    theirs = (F.conv_transpose2d if transposed else F.conv2d)(x, weight, stride=stride, padding=padding)
    assert torch.equal(ours(x, weight), theirs)
    assert torch.autograd.gradcheck(ours, (x, weight))
    assert torch.autograd.gradgradcheck(ours, (x, weight))


@pytest.mark.parametrize("wanted", ["images", "weights"])
def test_gradients_that_nobody_asked_for_are_not_taken(wanted: str) -> None:
    x = torch.randn(1, 2, 4, 4, requires_grad=wanted == "images")
    weight = torch.randn(3, 2, 3, 3, requires_grad=wanted == "weights")
    of_x, of_weight, _ = convolve(x, weight, padding=1).grad_fn.apply(torch.ones(1, 3, 4, 4))
    assert (of_x is None, of_weight is None) == (wanted == "weights", wanted == "images")
