"""Weights that a coordinator crafts: what each attack gets back without any check, and what it refuses."""

import pytest
import torch
from torch import Tensor, nn

from polyclinic.attacks import crafting
from polyclinic.attacks.coordinator import CraftedSum, Fishing, Imprint, OverflowFilter, TrapWeights
from polyclinic.attacks.crafting import input_of
from polyclinic.attacks.scoring import identified
from polyclinic.errors import BadInput
from polyclinic.models import Backbone, build
from polyclinic.randomness import seeded, torch_rng


def pictures(count: int, size: int, seed: int = 0) -> Tensor:
    """Smooth grey images [N, 1, size, size] in [0, 1] of different brightness."""
    rng = torch_rng(seed, "pictures")
    coarse = torch.rand(count, 1, 5, 5, generator=rng)
    images = nn.functional.interpolate(coarse, size, mode="bicubic", align_corners=False).clamp(0, 1)
    return images * (0.4 + 0.6 * torch.rand(count, 1, 1, 1, generator=rng))


def network(backbone: str, size: int, norm: str = "batch", outputs: int = 2) -> Backbone:
    with seeded(0, "network"):
        return build(backbone, channels=1, outputs=outputs, size=size, norm=norm)


def gradient(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """What FedSGD sends."""
    model.train().zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


LABELS = torch.arange(6) % 2
IMAGES, PUBLIC, OTHERS = pictures(6, 16, 1), pictures(60, 16, 2), pictures(6, 16, 3)
ONE = torch.tensor([0, 0, 0, 0, 1, 0])  # one image of class 1


def attacked(attack, backbone="cnn-64-128-64-32", size=16, send=gradient):
    """How many of six images come back."""
    images, public, others = pictures(6, size, 1), pictures(60, size, 2), pictures(6, size, 3)
    crafted = attack.craft(network(backbone, size), public)
    return identified(attack.recover(send(crafted, images, LABELS), crafted, public), images, others)


@pytest.mark.parametrize(("refused", "says"), [
    *(
        (lambda name=name: crafting.dense_layer(network(name, 16)), "use 'fishing'")
        for name in ("small-cnn", "resnet18")
    ),
    (lambda: crafting.activation(nn.Sequential(nn.Linear(2, 2))), "neither ReLU nor tanh"),
    (lambda: CraftedSum(sites=3).rows(network("cnn-32-64-128", 12), 3), "site 3"),
    (lambda: Imprint().craft(network("lenet5", 16), pictures(1, 16)), "two images or more"),
    (lambda: TrapWeights().craft(network("lenet5", 16), pictures(5, 16)), "need ReLU"),
    (lambda: TrapWeights().craft(network("resnet18", 16), pictures(4, 16, 2)), "use 'fishing'"),
    (lambda: Fishing(target_class=2).craft(network("lenet5", 16), PUBLIC), "target_class 2"),
    (lambda: Fishing().craft(network("unet", 16), PUBLIC), "the network has none"),
])  # fmt: skip
def test_networks_that_do_not_fit_are_refused(refused, says):
    with pytest.raises(BadInput, match=says):
        refused()


def test_strided_convolutions_pass_every_pixel_once_and_rows_hold_weight_over_bias():
    """Three strides of 2 and 64 channels: 64 numbers for each square of 8 x 8 pixels."""
    images, model = pictures(2, 16), network("cnn-64-128-64-32", 16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = input_of(crafting.open_front(model), "fc1")(images)
    assert torch.allclose(inputs.sort(1).values, images.flatten(1).sort(1).values)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    inputs = torch.tensor([[0.1, 0.2, 0.3], [0.5, 0.5, 0.0]])
    bias = torch.tensor([2.0, -0.5, 1e-9])
    weight = torch.stack([2 * inputs[0], -0.5 * inputs[1], torch.tensor([1.0, 1.0, 1.0])])
    assert torch.allclose(crafting.inputs_of_rows(weight, bias), inputs)
    repeated = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1e-4]])
    assert torch.equal(crafting.without_repeats(repeated), repeated[:2])


def test_many_images_are_inverted_a_few_at_a_time(monkeypatch):
    """Memory must not grow with the number of images; what comes back is the same up to rounding."""
    crafted = crafting.open_front(network("cnn-32-64-128", 12))
    images, public = pictures(5, 12, 1), pictures(6, 12, 2)
    front = input_of(crafted, "fc1")
    inputs = front(images).detach()
    whole = crafting.invert_front(front, inputs, public)
    monkeypatch.setattr(crafting, "AT_ONCE", 2)
    most: list[int] = []
    pieces = crafting.invert_front(lambda some: most.append(len(some)) or front(some), inputs, public)
    assert max(most) <= 2
    assert float((whole - pieces).abs().mean()) < 0.02


@pytest.mark.parametrize(("attack", "backbone", "size"), [
    (Imprint(), "cnn-64-128-64-32", 16), (Imprint(), "cnn-32-64-128", 12), (Imprint(), "lenet5", 16),
    (TrapWeights(), "cnn-32-64-128", 12),
])  # fmt: skip
def test_images_come_back(attack, backbone, size):
    found = attacked(attack, backbone, size)
    assert found.images >= 4  # five or six
    assert found.by_chance == 0


def test_bins_that_are_alone_give_the_image_to_the_last_digits_and_honest_weights_nothing():
    full, weak = attacked(Imprint()), attacked(Imprint(strength=0.1))
    assert full.psnr > 100
    assert weak.images < full.images
    assert attacked(Imprint(measure="random", seed=1)).images >= 3
    honest = network("cnn-64-128-64-32", 16)
    found = Imprint().recover(gradient(honest, IMAGES, LABELS), honest, PUBLIC)
    assert identified(found, IMAGES, OTHERS, least=25.0).images == 0


def test_a_row_is_alive_for_the_share_it_was_set_to():
    public = pictures(60, 12, 2)
    crafted = TrapWeights(alive=0.1, strength=0.5).craft(network("cnn-32-64-128", 12), public)
    alive = crafted.fc1(input_of(crafted, "fc1")(public)) > 0
    assert alive[:, :64].float().mean(0).tolist() == pytest.approx([0.1] * 64, abs=1 / 60)
    assert not alive[:, 64:].any()
    mixed = attacked(TrapWeights(alive=0.95), "cnn-32-64-128", 12)
    assert mixed.images < attacked(TrapWeights(), "cnn-32-64-128", 12).images


@pytest.mark.parametrize("separate", [True, False])
def test_a_sum_of_sites_gives_images_back(separate):
    """Each with its site where sites got weights of their own; else they share the bins."""
    attack, sites = CraftedSum(sites=2, separate=separate), [pictures(4, 12, 1), pictures(4, 12, 5)]
    public = pictures(60, 12, 2)
    crafted = [attack.craft(network("cnn-32-64-128", 12), public, site) for site in range(2)]
    sent = [gradient(model, images, LABELS[:4]) for model, images in zip(crafted, sites, strict=True)]
    total = {name: sent[0][name] + sent[1][name] for name in sent[0]}
    assert torch.equal(crafted[0].fc1.weight, crafted[1].fc1.weight) != separate
    pairs = [(0, sites[0], sites[1]), (1, sites[1], sites[0])]
    for site, own, others in pairs if separate else [(0, torch.cat(sites), pictures(8, 12, 3))]:
        found = identified(attack.recover(total, crafted[site], public, site), own, others)
        assert found.images >= len(own) * 0.6
        assert found.by_chance == 0


@pytest.mark.parametrize(("backbone", "norm"), [("small-cnn", "batch"), ("small-cnn", "group"), ("resnet18", "group")])
def test_the_gradient_is_that_of_the_only_image_of_its_class(backbone, norm):
    attack = Fishing(target_class=1)
    crafted = attack.craft(network(backbone, 16, norm), PUBLIC)
    features = input_of(crafted, "fc")(IMAGES)[4]
    assert torch.allclose(attack.read_features(gradient(crafted, IMAGES, ONE), crafted), features, rtol=1e-3, atol=1e-5)
    assert attack.identify(features, crafted, torch.cat([IMAGES, OTHERS])) == 4


@pytest.mark.parametrize("backbone", ["cnn-32-64-128", "lenet5"])
def test_where_a_dense_layer_is_the_image_comes_back(backbone):
    attack = Fishing(target_class=1, open_convolutions=True)
    crafted = attack.craft(network(backbone, 16), PUBLIC)
    scored = identified(attack.recover(gradient(crafted, IMAGES, ONE), crafted, PUBLIC), IMAGES, OTHERS)
    assert (scored.images, scored.by_chance) == (1, 0)


def overflows(backbone, candidates, **settings):
    attack = OverflowFilter(**settings)
    crafted = [attack.craft(network(backbone, 16), candidate, PUBLIC) for candidate in candidates]
    return sum(attack.recover(gradient(model, IMAGES, LABELS)) for model in crafted)


@pytest.mark.parametrize("backbone", ["lenet5", "cnn-32-64-128", "cnn-64-128-64-32"])
def test_members_overflow_and_others_do_not(backbone):
    assert overflows(backbone, IMAGES) == 6
    assert overflows(backbone, OTHERS) <= 1


def test_small_weights_tell_nothing_and_a_refusal_is_an_answer():
    assert overflows("lenet5", IMAGES, strength=1e30) == 0
    assert OverflowFilter().recover(None)
    assert not OverflowFilter().recover({"w": torch.zeros(2)})
