"""What the last and the first layer's gradients give away without any search."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from polyclinic.attacks.gradient_inversion import analytic as labels
from polyclinic.attacks.gradient_inversion.analytic import AnalyticInversion, exact_batch, input_of_linear
from polyclinic.attacks.gradient_inversion.networks import LeNet, prepare_for_attack, with_random_weights
from polyclinic.attacks.gradient_inversion.objective import Simulation
from polyclinic.errors import BadInput
from polyclinic.randomness import torch_rng


def gradients_of(model: nn.Module, images: Tensor, classes_of: Tensor, classes: int) -> dict[str, Tensor]:
    """Of images [N, B, ...] with classes [N, B], each row a site."""
    return vmap(Simulation(prepare_for_attack(model)))(images, nn.functional.one_hot(classes_of, classes).float())


@pytest.mark.parametrize("bias", [True, False])
def test_the_sign_rule_is_right_a_thousand_times(bias: bool):
    """Ten networks, a hundred images each, of random classes."""
    wrong = 0
    for network in range(10):
        rng = torch_rng("sign", network)
        model = with_random_weights(LeNet(1, 10, 8), rng)
        model.fc = nn.Linear(48, 10, bias=bias)
        with_random_weights(model.fc, rng, spread=0.3)
        images = torch.rand(100, 1, 1, 8, 8, generator=rng)
        classes_of = torch.randint(10, (100, 1), generator=rng)
        found = labels.label_by_sign(gradients_of(model, images, classes_of, 10), labels.last_linear(model))
        wrong += int((found != classes_of[:, 0]).sum())
    assert wrong == 0


@pytest.mark.parametrize("size", [2, 8, 32])
def test_counts_of_a_batch(size: int):
    rng = torch_rng("counts", size)
    model = with_random_weights(LeNet(1, 10, 8), rng)
    with_random_weights(model.fc, rng, spread=0.1)  # a network before training: its outputs are nearly alike
    images = torch.rand(20, size, 1, 8, 8, generator=rng)
    classes_of = torch.randint(10, (20, size), generator=rng)
    found = labels.counts(gradients_of(model, images, classes_of, 10), model, labels.last_linear(model), size)
    expected = torch.stack([row.bincount(minlength=10) for row in classes_of])
    assert torch.equal(found, expected)
    assert torch.equal(labels.as_labels(found), classes_of.sort(dim=1).values)


def test_counts_are_exact_when_features_are_alike():
    """Algebra alone: three images with the same features, classes 0, 0 and 2, and gradients by hand."""
    linear = nn.Linear(2, 3)
    features, classes_of = torch.tensor([0.3, 0.8]), torch.tensor([0, 0, 2])
    errors = linear(features).softmax(0) - nn.functional.one_hot(classes_of, 3)
    sent = {"weight": (errors.mean(0)[:, None] * features).detach()[None], "bias": errors.mean(0).detach()[None]}
    model = nn.Sequential(linear)
    named = {f"0.{name}": tensor for name, tensor in sent.items()}
    assert labels.counts(named, model, "0", 3).tolist() == [[2, 0, 1]]


def test_counts_of_nonsense_still_sum_to_the_batch():
    """Noise instead of a gradient gives wrong counts, but counts."""
    model = nn.Sequential(nn.Linear(2, 3))
    rng = torch_rng("noise")
    noise = {"0.weight": torch.randn(5, 3, 2, generator=rng), "0.bias": 9 * torch.randn(5, 3, generator=rng)}
    found = labels.counts(noise, model, "0", 4)
    assert found.sum(1).tolist() == [4] * 5
    assert int(found.min()) >= 0


def perceptron(rng: torch.Generator) -> nn.Module:
    return with_random_weights(nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)), rng)


def test_the_input_of_a_first_layer_is_exact_and_several_images_show_in_the_residual():
    rng = torch_rng("exact")
    model = perceptron(rng).double()
    images = torch.rand(5, 1, 1, 4, 4, generator=rng, dtype=torch.float64)
    sent = vmap(Simulation(prepare_for_attack(model)))(
        images, torch.eye(3, dtype=torch.float64)[[0, 1, 2, 0, 1]][:, None]
    )
    found = AnalyticInversion().run(sent, model, (1, 4, 4))
    torch.testing.assert_close(found.inputs, images.flatten(1), rtol=0, atol=1e-12)
    assert float(found.residual.max()) < 1e-20
    rng = torch_rng("mixture")
    model = perceptron(rng)
    images = torch.rand(1, 4, 1, 4, 4, generator=rng)
    sent = vmap(Simulation(prepare_for_attack(model)))(images, torch.eye(3)[[0, 1, 2, 0]][None])
    assert float(AnalyticInversion().run(sent, model, (1, 4, 4)).residual) > 1e-3


def gradients(images: Tensor, *, width: int = 128) -> tuple[nn.Linear, Tensor, Tensor]:
    """The first layer of a network with one hidden layer, and its gradients [width, in] and [width]."""
    rng = torch_rng("exact batch", width)
    first, head = nn.Linear(images[0].numel(), width), nn.Linear(width, 4)
    with torch.no_grad():
        for one in (*first.parameters(), *head.parameters()):
            one.copy_(torch.randn(one.shape, generator=rng) / one.shape[-1] ** 0.5)
    loss = F.cross_entropy(head(first(images.flatten(1)).relu()), torch.arange(len(images)) % 4)
    weight, bias = torch.autograd.grad(loss, [first.weight, first.bias])
    return first, weight, bias


def some_images(count: int) -> Tensor:
    """Normalised pictures, so that each reaches other units."""
    return torch.randn(count, 1, 10, 10, generator=torch_rng("exact batch", "images", count))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_small_batch_comes_back(count):
    images = some_images(count)
    found = exact_batch(*gradients(images))
    assert found is not None
    assert found.agreement > 0.99
    far = torch.cdist(found.images, images.flatten(1))
    assert float(far.amin(0).max()) < 0.5  # of about 10, the length of an image


def test_images_that_share_their_units_are_not_taken_for_solved():
    images = some_images(1) + 0.01 * some_images(4)
    found = exact_batch(*gradients(images))
    exact = found is not None and float(torch.cdist(found.images, images.flatten(1)).amin(0).max()) < 0.5
    assert found is None or found.agreement < 0.95 or exact


def test_two_images_whose_gradients_are_proportional_look_like_one():
    """At a linear classifier that starts from zero, all images of one class have the same gradient of the outputs."""
    images, layer = some_images(2).flatten(1), nn.Linear(100, 3)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
    loss = F.cross_entropy(layer(images), torch.tensor([1, 1]))
    weight, bias = torch.autograd.grad(loss, [layer.weight, layer.bias])
    found = input_of_linear(weight[None], bias[None])
    assert float(found.residual) < 1e-6
    torch.testing.assert_close(found.inputs[0], images.mean(0))


def test_gradients_that_hold_no_image_give_none():
    assert exact_batch(*gradients(some_images(6), width=4)) is None  # more images than units
    assert exact_batch(nn.Linear(5, 8), torch.zeros(8, 5), torch.zeros(8)) is None
    assert input_of_linear(torch.zeros(1, 8, 5), torch.zeros(1, 8)).residual.tolist() == [1.0]


WITHOUT_BIAS = nn.Sequential(nn.Linear(16, 3, bias=False))


@pytest.mark.parametrize(("work", "says"), [
    (lambda: labels.counts({"0.weight": torch.ones(1, 3, 16)}, WITHOUT_BIAS, "0", 2), "need a bias"),
    (lambda: labels.last_linear(nn.Conv2d(1, 1, 1)), "no linear layer"),
    *(
        (lambda model=model: AnalyticInversion().run({}, model, (1, 4, 4)), "layer that is linear with a bias")
        for model in (LeNet(), WITHOUT_BIAS, nn.Flatten(), nn.Linear(15, 2))
    ),
])  # fmt: skip
def test_networks_without_such_a_layer_are_refused(work, says):
    with pytest.raises(BadInput, match=says):
        work()
