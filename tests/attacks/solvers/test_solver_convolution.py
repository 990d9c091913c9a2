"""Convolutions with weights of their own: three operations, each the derivative of the others, one input at a time."""

import pytest
import torch
from torch.nn import functional as F

from polyclinic.attacks.solvers.convolution import Convolve, Gather, SendBack, Window

WINDOWS = [Window((3, 3), (1, 1), (1, 1)), Window((3, 2), (2, 1), (1, 0)), Window((1, 1), (1, 1), (0, 0))]
SIZE = torch.Size((4, 5))


def inputs(window):
    """Images, weights and gradients of outputs of two targets."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 1, 2, *SIZE, generator=rng, dtype=torch.float64)
    w = torch.randn(2, 3, 2, *window.kernel, generator=rng, dtype=torch.float64)
    y = torch.randn(plain(x, w, window).shape, generator=rng, dtype=torch.float64)
    return {"x": x, "w": w, "y": y}


def plain(x, w, window):
    pairs = zip(x, w, strict=True)
    return torch.stack([F.conv2d(one, kernels, stride=window.stride, padding=window.padding) for one, kernels in pairs])


@pytest.mark.parametrize("window", WINDOWS)
def test_the_operations_are_a_convolution_and_its_two_transposes(window):
    given = inputs(window)
    x, w = given["x"].requires_grad_(), given["w"].requires_grad_()
    wanted = plain(x, w, window)
    torch.testing.assert_close(Convolve.apply(x, w, window, SIZE), wanted)
    of_x, of_w = torch.autograd.grad(wanted, (x, w), given["y"])
    torch.testing.assert_close(SendBack.apply(given["y"], w, window, SIZE), of_x)
    torch.testing.assert_close(Gather.apply(given["y"], x, window, SIZE), of_w)


@pytest.mark.parametrize("learned", [0, 1])
@pytest.mark.parametrize(("operation", "names"), [(Convolve, "xw"), (SendBack, "yw"), (Gather, "yx")])
def test_the_gradient_of_one_input_alone_is_right(operation, names, learned):
    window = WINDOWS[1]
    given = [inputs(window)[name] for name in names]
    given[learned].requires_grad_()
    assert torch.autograd.gradcheck(lambda one, other: operation.apply(one, other, window, SIZE), given)
