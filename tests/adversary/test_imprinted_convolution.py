"""Attack: channels of a convolution in the place of units of a dense layer. A channel whose bias is so low that one
image of a batch passes it has that image's patch for itself in its gradient: here the whole image, as the kernel of the
last convolution is as wide as what enters it."""

import pytest
import torch
from attacked_site import SITE, ask

from polyclinic.attacks.crafting import input_of
from polyclinic.federation.call import DataDependentRefusal
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.training.image_draws import hold_rows_of_few

LAYER = "conv3"


def site(kit, backbone):
    host = kit.host(
        model={"backbone": backbone, "norm": "group"},
        method={"name": "fedsgd", "rounds": 3},
        optimizer={"batch_size": 48, "lr": 0.05},
    )
    weights = host.spec.first_weights(SITE)
    model = host.spec.trainer.model
    model.load_state_dict(weights)
    images = torch.from_numpy(host.sites.get(SITE).data.train.images.copy()).float() / 255
    return host, weights, model, images


@torch.no_grad()
def trapped(model, weights, images):
    """Weights in which each channel of a convolution is passed by one image, at one place."""
    layer = model.get_submodule(LAYER)
    each = layer(input_of(model, LAYER)(images)).flatten(2).amax(2)  # [N, U]
    first, second = each.topk(2, dim=0).values
    return {**weights, f"{LAYER}.bias": layer.bias - (first + second) / 2}


def test_no_channel_learns_from_one_image_of_a_batch(kit):
    """Whoever knows the images nearly could set the biases so; the incoming check is off here."""
    host, weights, model, images = site(kit, "cnn-64-128-64-32")
    crafted = trapped(model, weights, images)
    answer = ask(host, "gradient", 1, weights=crafted).parcels[0].tensors
    assert float(answer[f"{LAYER}.weight"].abs().max()) == 0
    honest = kit.host("honest", model={"backbone": "cnn-64-128-64-32"}, method={"name": "fedsgd", "rounds": 3})
    usual = ask(honest, "gradient", 1, weights=weights).parcels[0].tensors[f"{LAYER}.weight"]
    assert float((usual.flatten(1).norm(dim=1) > 0).float().mean()) > 0.5


def test_a_channel_that_answers_to_few_images_of_a_batch_is_held_back():
    layer = torch.nn.Conv2d(1, 3, 3)
    images = torch.rand(8, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    answers = torch.zeros(8, 3, 2, 2)
    answers[:2, 0] = 1  # of two images
    answers[:5, 1, 0, 0] = torch.tensor([1.0, 0.1, 0.1, 0.1, 0.1])  # of one above all
    answers[:, 2, 1] = 1  # of all
    with hold_rows_of_few(layer):
        (layer(images) * answers).sum().backward()
    assert layer.weight.grad[:2].abs().max() == 0
    assert layer.weight.grad[2].abs().max() > 0


@torch.no_grad()
def imprinted(weights, share):
    """Every channel of a convolution measures the same thing, each with another threshold, in so large a share."""
    kernels = weights[f"{LAYER}.weight"].clone()
    kernels[: round(share * len(kernels))] = kernels[0]
    bias = torch.linspace(-1, 1, len(kernels)) * kernels[0].norm()
    name = f"{LAYER}.bias" if f"{LAYER}.bias" in weights else "norm3.bias"
    return {**weights, f"{LAYER}.weight": kernels, name: bias.to(weights[name])}


@pytest.mark.parametrize("backbone", ["cnn-64-128-64-32", "small-cnn"])
@pytest.mark.parametrize("share", [1.0, 0.3, 0.1])
def test_bins_in_a_convolution_are_stopped_before_any_work(kit, backbone, share):
    kit.policy(incoming="on = true")
    host, weights, _, _ = site(kit, backbone)
    with pytest.raises((ParcelRejected, DataDependentRefusal), match="incoming check"):
        ask(host, "gradient", weights=imprinted(weights, share))
