"""The papers' networks, and layers of many targets at once, on a GPU too: second derivatives are torch's own."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from polyclinic.attacks.gradient_inversion.networks import (
    LeNet,
    UnstridedResNet18,
    prepare_for_attack,
    with_random_weights,
)
from polyclinic.attacks.gradient_inversion.objective import (
    FreeLabels,
    LocalTraining,
    Objective,
    Simulation,
    StackedSimulation,
    cross_entropy,
)
from polyclinic.attacks.solvers.layers import BatchStatistics2d, Convolve, Gather, ManyTargetsConv2d, SendBack, Window
from polyclinic.attacks.solvers.search import allow_tf32
from polyclinic.errors import BadInput
from polyclinic.models import build, parameter_count
from polyclinic.randomness import torch_rng


def seeded(make) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().double()


def test_sizes_are_the_papers_and_weights_drawn_from_the_generator():
    assert parameter_count(LeNet()) == 85_036
    assert parameter_count(UnstridedResNet18()) == 14_445_732
    assert LeNet(1, 10, 28)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    first, second = (with_random_weights(LeNet(), torch_rng(0, "w")) for _ in range(2))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
        assert float(a.detach().abs().max()) <= 0.5
    assert float(first.fc.weight.detach().abs().max()) > 0.49
    plain, drawn = (with_random_weights(seeded(small_resnet), torch_rng(0), batch_norm=b).bn1 for b in (False, True))
    assert plain.weight.tolist() == [1.0] * 4
    assert all(0 < float(one.detach().abs().max()) <= 0.5 for one in drawn.parameters())


def one_by_one(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The gradient, with respect to each target's images, of the sum of squares of its gradients: plain autograd."""
    slopes = []
    for batch, label in zip(images, labels, strict=True):
        batch = batch.clone().requires_grad_()
        gradients = torch.autograd.grad(cross_entropy(model(batch), label), list(model.parameters()), create_graph=True)
        slopes.append(torch.autograd.grad(sum((g * g).sum() for g in gradients), batch)[0])
    return torch.stack(slopes)


def all_at_once(twin: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    images = images.clone().requires_grad_()
    sent = vmap(Simulation(twin))(images, labels)
    return torch.autograd.grad(sum((g * g).sum() for g in sent.values()), images)[0]


def assert_same_second_derivatives(model: nn.Module, twin: nn.Module, size: int, classes: int, batch: int = 2) -> None:
    rng = torch_rng("second derivatives")
    images = torch.rand(3, batch, 3, size, size, generator=rng, dtype=torch.float64)
    labels = torch.rand(3, batch, classes, generator=rng, dtype=torch.float64).softmax(-1)
    expected = one_by_one(model, images, labels)
    assert float(expected.abs().max()) > 0
    torch.testing.assert_close(all_at_once(twin, images, labels), expected, rtol=1e-8, atol=1e-10)


def small_resnet() -> nn.Module:
    return UnstridedResNet18(3, 4, 8, widths=(4, 6, 6, 8))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_batch_norm_in_both_modes(mode):
    model = seeded(small_resnet).train(mode == "train")
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer += 0.3
    assert_same_second_derivatives(model, prepare_for_attack(model, batch_norm=mode), 8, 4)


def test_batch_norm_leaves_its_running_statistics_alone():
    model = prepare_for_attack(seeded(small_resnet))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(torch.rand(2, 3, 8, 8, dtype=torch.float64))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_is_torchs_to_the_second_derivative(affine: bool):
    """For one target: values and derivatives by images, weight and bias, with a mean far from zero."""
    rng = torch_rng("batch norm")
    ours, torchs = BatchStatistics2d(3, affine=affine).double(), nn.BatchNorm2d(3, affine=affine).double()
    images = (4 + torch.randn(2, 3, 4, 5, generator=rng, dtype=torch.float64)).requires_grad_()
    given = torch.randn(2, 3, 4, 5, generator=rng, dtype=torch.float64)
    found = []
    for layer in (ours, torchs):
        if affine:
            layer.weight.data, layer.bias.data = torch.arange(1.0, 4).double(), torch.arange(3.0).double()
        wanted = [images, *layer.parameters()]
        first = torch.autograd.grad((layer(images) * given).square().sum(), wanted, create_graph=True)
        second = torch.autograd.grad(sum(f.pow(3).sum() for f in first), wanted[: 2 if affine else 1])
        found.append([layer(images), *first, *second])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("make", [small_resnet, lambda: LeNet(3, 4, 9)])
def test_convolution_for_many_targets(make):
    """The GPU's convolution, tried on the CPU; odd sizes, strides, and kernels of 1, 3 and 5."""
    model = seeded(make).train()
    twin = prepare_for_attack(model)
    for layer in twin.modules():
        if ManyTargetsConv2d.can_replace(layer):
            layer.__class__ = ManyTargetsConv2d
    assert sum(isinstance(layer, ManyTargetsConv2d) for layer in twin.modules()) >= 3
    assert_same_second_derivatives(model, twin, 9 if isinstance(model, LeNet) else 8, 4)


def test_several_local_steps_of_many_targets():
    """From the second step on each target has weights of its own; against one target after the other."""
    twin = prepare_for_attack(seeded(small_resnet).train())
    for layer in twin.modules():
        if ManyTargetsConv2d.can_replace(layer):
            layer.__class__ = ManyTargetsConv2d
    simulation = Simulation(twin, training=LocalTraining(0.1, steps=2, momentum=0.5))
    rng = torch_rng("several steps")
    images = torch.rand(2, 2, 3, 8, 8, generator=rng, dtype=torch.float64, requires_grad=True)
    labels = torch.rand(2, 2, 4, generator=rng, dtype=torch.float64).softmax(-1)
    together = vmap(simulation)(images, labels)
    apart = [simulation(batch, label) for batch, label in zip(images, labels, strict=True)]
    one_by_one = {name: torch.stack([sent[name] for sent in apart]) for name in together}
    sizes = [sum((t * t).sum() for t in sent.values()) for sent in (together, one_by_one)]
    slopes = [torch.autograd.grad(size, images, retain_graph=True)[0] for size in sizes]
    for name, tensor in together.items():
        torch.testing.assert_close(tensor, one_by_one[name], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(*slopes, rtol=1e-8, atol=1e-10)


def test_batch_norms_without_a_twin_and_unusual_convolutions_keep_torchs_or_are_named():
    with pytest.raises(ValueError, match="more than one value"):
        BatchStatistics2d(2)(torch.zeros(1, 2, 1, 1))
    with pytest.raises(BadInput, match="BatchNorm1d"):
        prepare_for_attack(nn.Sequential(nn.BatchNorm1d(3)))
    assert ManyTargetsConv2d.can_replace(nn.Conv2d(2, 2, 3))
    for settings in ({"groups": 2}, {"dilation": 2}, {"padding": "same"}, {"padding": 1, "padding_mode": "reflect"}):
        assert not ManyTargetsConv2d.can_replace(nn.Conv2d(2, 2, 3, **settings))


@pytest.mark.parametrize(
    ("backbone", "norm"), [("small-cnn", "batch"), ("small-cnn", "group"), ("lenet5", "group"), ("resnet18", "batch")]
)
def test_our_backbones(backbone: str, norm: str):
    size = 40 if backbone == "resnet18" else 16
    model = seeded(lambda: build(backbone, channels=3, outputs=4, size=size, norm=norm)).train()
    assert_same_second_derivatives(model, prepare_for_attack(model), size, 4, batch=1 if backbone == "resnet18" else 2)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("make", [small_resnet, lambda: LeNet(3, 4, 9)])
def test_each_target_with_a_network_of_its_own(make, fast: bool):
    """Second derivatives of three networks at once, with torch's convolution and with the GPU's, tried on the CPU."""
    models = [with_random_weights(seeded(make), torch_rng("own", i), batch_norm=True).train() for i in range(3)]
    twins = [prepare_for_attack(model) for model in models]
    for layer in [layer for twin in twins for layer in twin.modules()]:
        if fast and ManyTargetsConv2d.can_replace(layer):
            layer.__class__ = ManyTargetsConv2d
    size = 9 if isinstance(models[0], LeNet) else 8
    rng = torch_rng("own networks")
    images = torch.rand(3, 2, 3, size, size, generator=rng, dtype=torch.float64)
    labels = torch.rand(3, 2, 4, generator=rng, dtype=torch.float64).softmax(-1)
    expected = torch.cat([one_by_one(m, images[i : i + 1], labels[i : i + 1]) for i, m in enumerate(models)])
    images.requires_grad_()
    simulation = StackedSimulation(twins)
    sent = simulation.of_targets(images, labels)
    (found,) = torch.autograd.grad(sum((g * g).sum() for g in sent.values()), images)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    some = simulation.select_rows(torch.tensor([2])).of_targets(images[2:], labels[2:])
    torch.testing.assert_close(some["conv1.weight"][0], sent["conv1.weight"][2], rtol=1e-8, atol=1e-12)


def test_a_convolution_whose_outputs_nothing_depends_on_and_an_image_without_a_batch():
    """Two linear layers: the second derivative by the inner images is nothing at all."""
    first, second = (nn.Conv2d(2, 2, 3, padding=1).double() for _ in range(2))
    linear = nn.Sequential(first, second)
    for layer in linear:
        layer.__class__ = ManyTargetsConv2d
    images = torch.rand(3, 1, 2, 4, 4, generator=torch_rng("linear"), dtype=torch.float64).requires_grad_()
    simulation = Simulation(linear, lambda outputs, labels: (outputs * labels).sum(), names=["0.weight"])
    sent = simulation.of_targets(images, torch.ones_like(images))
    (found,) = torch.autograd.grad(sent["0.weight"].square().sum(), images)
    assert float(found.norm()) > 0
    assert linear(images[0, 0].detach()).shape == (2, 4, 4)


WINDOWS = [Window((3, 3), (1, 1), (1, 1)), Window((3, 2), (2, 1), (1, 0)), Window((1, 1), (1, 1), (0, 0))]
SIZE = torch.Size((4, 5))


def given_inputs(window):
    """Images, weights and gradients of outputs of two targets."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 1, 2, *SIZE, generator=rng, dtype=torch.float64)
    w = torch.randn(2, 3, 2, *window.kernel, generator=rng, dtype=torch.float64)
    y = torch.randn(plain_convolution(x, w, window).shape, generator=rng, dtype=torch.float64)
    return {"x": x, "w": w, "y": y}


def plain_convolution(x, w, window):
    pairs = zip(x, w, strict=True)
    return torch.stack([F.conv2d(one, kernels, stride=window.stride, padding=window.padding) for one, kernels in pairs])


@pytest.mark.parametrize("window", WINDOWS)
def test_the_operations_are_a_convolution_and_its_two_transposes(window):
    given = given_inputs(window)
    x, w = given["x"].requires_grad_(), given["w"].requires_grad_()
    wanted = plain_convolution(x, w, window)
    torch.testing.assert_close(Convolve.apply(x, w, window, SIZE), wanted)
    of_x, of_w = torch.autograd.grad(wanted, (x, w), given["y"])
    torch.testing.assert_close(SendBack.apply(given["y"], w, window, SIZE), of_x)
    torch.testing.assert_close(Gather.apply(given["y"], x, window, SIZE), of_w)


@pytest.mark.parametrize("learned", [0, 1])
@pytest.mark.parametrize(("operation", "names"), [(Convolve, "xw"), (SendBack, "yw"), (Gather, "yx")])
def test_the_gradient_of_one_input_alone_is_right(operation, names, learned):
    window = WINDOWS[1]
    given = [given_inputs(window)[name] for name in names]
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
