"""Layers of many targets on a GPU, tried on the CPU against torch's own."""

import pytest
import torch
from torch.nn import functional as F

from polyclinic.attacks.gradient_inversion.networks import UnstridedResNet18, prepare_for_attack
from polyclinic.attacks.gradient_inversion.objective import FreeLabels, Objective, Simulation
from polyclinic.attacks.solvers.layers import Convolve, Gather, SendBack, Window
from polyclinic.attacks.solvers.search import allow_tf32
from polyclinic.randomness import torch_rng

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


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def evaluation(device: str, count: int = 3, batch: int = 1, *, tf32: bool):
    """Loss and gradient of targets whose network has eight channels or more, for convolutions with channels last."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = UnstridedResNet18(3, 4, 8, widths=(8, 8, 16, 16))
    rng = torch_rng("passes")
    images = torch.rand(count, batch, 3, 8, 8, generator=rng).to(device)
    labels = torch.rand(count, batch, 4, generator=rng).softmax(-1).to(device)
    points = torch.randn(count, batch * (3 * 64 + 4), generator=rng).to(device)
    simulation = Simulation(prepare_for_attack(model, device=device))
    with allow_tf32(tf32):
        observed = {name: one.detach() for name, one in simulation.of_targets(images, labels).items()}
        objective = Objective(simulation, observed, FreeLabels((4,)), image_shape=(batch, 3, 8, 8))
        return [one.cpu() for one in objective(points)]


@on_gpu
@pytest.mark.parametrize(("count", "batch"), [(3, 1), (1, 1), (1, 2), (2, 3)])
def test_an_evaluation_is_that_of_float32_up_to_rounding(count, batch):
    exact, rounded = (evaluation("cuda", count, batch, tf32=tf32) for tf32 in (False, True))
    for one, other in zip(exact, rounded, strict=True):
        assert float((one - other).norm() / one.norm()) < 0.02
    for one, other in zip(exact, evaluation("cpu", count, batch, tf32=False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
