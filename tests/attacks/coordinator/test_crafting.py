"""What crafted networks are built from: an open front, its inverse, and rows of a gradient."""

import pytest
import torch
from crafted_site import network, pictures
from torch import nn

from polyclinic.attacks.coordinator import crafting
from polyclinic.errors import BadInput
from polyclinic.metrics.images import psnr


def test_strided_convolutions_pass_every_pixel_once():
    """Three strides of 2 and 64 channels: 64 numbers for each square of 8 x 8 pixels."""
    images = pictures(2, 16)
    crafted = crafting.open_front(network("cnn-64-128-64-32", 16))
    inputs = crafting.input_of(crafted, "fc1")(images)
    assert torch.allclose(inputs.sort(1).values, images.flatten(1).sort(1).values)


def test_opening_leaves_the_network_itself_alone():
    model = network("lenet5", 16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    crafting.open_front(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_the_inverse_of_strides_finds_noise_of_which_the_attackers_own_images_tell_nothing():
    crafted = crafting.open_front(network("cnn-64-128-64-32", 16))
    images = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    front = crafting.input_of(crafted, "fc1")
    found = crafting.invert_front(front, front(images).detach(), pictures(20, 16))
    assert float(psnr(found, images).min()) > 100


def test_the_inverse_of_max_pooling_improves_on_the_decoder_it_starts_from():
    crafted = crafting.open_front(network("cnn-32-64-128", 12))
    images, public = pictures(2, 12, 1), pictures(6, 12, 2)
    front = crafting.input_of(crafted, "fc1")
    inputs = front(images).detach()
    start = crafting._decoder(crafting.values_of(front, public), public)(inputs)
    found = crafting.invert_front(front, inputs, public)
    assert float(psnr(found, images).min()) > 30 > float(psnr(start, images).max())


def test_rows_hold_weight_over_bias():
    inputs = torch.tensor([[0.1, 0.2, 0.3], [0.5, 0.5, 0.0]])
    bias = torch.tensor([2.0, -0.5, 1e-9])
    weight = torch.stack([2 * inputs[0], -0.5 * inputs[1], torch.tensor([1.0, 1.0, 1.0])])
    assert torch.allclose(crafting.inputs_of_rows(weight, bias), inputs)


def test_repeats_are_left_out():
    inputs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1e-4]])
    assert torch.equal(crafting.without_repeats(inputs), inputs[:2])


def test_difference_is_what_training_took_away():
    before = {"w": torch.tensor([3.0]), "steps": torch.tensor(4)}
    assert crafting.difference(before, {"w": torch.tensor([1.0]), "steps": torch.tensor(5)}) == {
        "w": torch.tensor([2.0])
    }


@pytest.mark.parametrize("backbone", ["small-cnn", "resnet18"])
def test_a_network_without_a_layer_that_sees_places_is_named(backbone):
    with pytest.raises(BadInput, match="use 'fishing'"):
        crafting.dense_layer(network(backbone, 16))


def test_a_network_without_relu_or_tanh_is_named():
    with pytest.raises(BadInput, match="neither ReLU nor tanh"):
        crafting.activation(nn.Sequential(nn.Linear(2, 2)))


def test_many_images_are_inverted_a_few_at_a_time(monkeypatch):
    """Memory must not grow with the number of images; what comes back is the same up to rounding."""
    crafted = crafting.open_front(network("cnn-32-64-128", 12))
    images, public = pictures(5, 12, 1), pictures(6, 12, 2)
    front = crafting.input_of(crafted, "fc1")
    inputs = front(images).detach()
    whole = crafting.invert_front(front, inputs, public)
    monkeypatch.setattr(crafting, "AT_ONCE", 2)
    most: list[int] = []
    watched = lambda some: most.append(len(some)) or front(some)  # noqa: E731
    pieces = crafting.invert_front(watched, inputs, public)
    assert max(most) <= 2
    assert float((whole - pieces).abs().mean()) < 0.02


def test_a_search_keeps_no_graph_for_the_weights(monkeypatch):
    """It once held every step of the search in memory: 17 GB at 64 px."""
    crafted = crafting.open_front(network("cnn-64-128-64-32", 16))
    assert any(weight.requires_grad for weight in crafted.parameters())
    solve, kept = crafting._conjugate_gradients, []

    def watched(apply, right):
        found = solve(lambda step: (result := apply(step), kept.append(result.requires_grad))[0], right)
        kept.append(found.requires_grad)
        return found

    monkeypatch.setattr(crafting, "_conjugate_gradients", watched)
    front = crafting.input_of(crafted, "fc1")
    crafting.invert_front(front, front(pictures(2, 16, 1)).detach(), pictures(4, 16, 2))
    assert kept
    assert not any(kept)
