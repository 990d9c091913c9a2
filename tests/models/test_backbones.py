"""Every backbone: shapes, agreement with MONAI, norm layers, weights; cut in two it is the same network."""

import copy
import itertools
from functools import cache

import pytest
import torch
from monai.networks import nets
from quick_backbones import QUICK
from torch import nn

from polyclinic import models
from polyclinic.errors import BadInput


def images(channels: int, size: int, count: int = 2) -> torch.Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(size))


def randomise(model: nn.Module) -> None:
    """Weights and running statistics unlike the initial ones, so that no layer is close to the identity."""
    rng = torch.Generator().manual_seed(1)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=rng) + (1 if "bn" in name else 0))
        if name.endswith("running_var"):
            tensor.abs_().add_(0.1)


@pytest.mark.parametrize("size", [28, 31, 64])
@pytest.mark.parametrize("norm", models.NORMS)
@pytest.mark.parametrize("backbone", QUICK)
def test_any_size_and_channels_give_finite_outputs_of_the_promised_shape(backbone, norm, size):
    channels = 3 if size == 31 else 1
    model = models.build(backbone, channels=channels, outputs=4, size=size, norm=norm)
    output = model(images(channels, size))
    assert output.shape == ((2, 4, size, size) if model.dense else (2, 4))
    assert output.isfinite().all()


@pytest.mark.parametrize(
    ("backbone", "theirs", "channels"),
    [("resnet18", nets.resnet18, 1), ("resnet34", nets.resnet34, 3), ("resnet50", nets.resnet50, 1)],
    ids=["18", "34", "50"],
)
def test_monai_resnet_weights_load_and_give_the_same_outputs_and_gradients(backbone, theirs, channels):
    stem = {"conv1_t_size": 7, "conv1_t_stride": 2, "shortcut_type": "B", "bias_downsample": False}
    reference = theirs(spatial_dims=2, n_input_channels=channels, num_classes=5, **stem)
    randomise(reference)
    ours = models.build(backbone, channels=channels, outputs=5, size=40)
    ours.load_state_dict(reference.state_dict())
    for mode in (True, False):
        ours.train(mode)
        reference.train(mode)
        x = images(channels, 40)
        assert torch.equal(ours(x), reference(x))
    ours(x).square().sum().backward()
    reference(x).square().sum().backward()
    wanted = dict(reference.named_parameters())
    assert all(torch.allclose(p.grad, wanted[name].grad, rtol=1e-4) for name, p in ours.named_parameters())


@pytest.mark.parametrize(("backbone", "parameters"), [
    *(("resnet18", 11_689_512), ("resnet34", 21_797_672), ("resnet50", 25_557_032)),
    *(("resnet101", 44_549_160), ("resnet152", 60_192_808)),
])  # fmt: skip
def test_resnets_have_as_many_parameters_as_published_for_a_thousand_classes(backbone, parameters):
    with torch.device("meta"):
        assert models.parameter_count(models.build(backbone, channels=3, outputs=1000, size=224)) == parameters


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_unet_is_monais_where_nothing_needs_padding(norm):
    ours = models.build("unet", channels=1, outputs=1, size=32, norm=norm)
    kind = "batch" if norm == "batch" else ("group", {"num_groups": 16})
    theirs = nets.BasicUNet(spatial_dims=2, in_channels=1, out_channels=1, norm=kind)
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours(images(1, 32)), theirs(images(1, 32)))


def test_unet_512_has_the_papers_levels_and_computes_what_its_layers_say():
    model = models.build("unet-512", channels=3, outputs=1, size=32)
    # by hand: 3x3 weights, two numbers of batch norm a filter, 2x2 up-convolutions with bias, the last 1x1
    widths = (3, 32, 64, 128, 256, 512)
    down = sum(9 * a * b + 9 * b * b + 4 * b for a, b in itertools.pairwise(widths))
    up = sum(4 * 2 * w * w + w + 9 * 2 * w * w + 9 * w * w + 4 * w for w in (256, 128, 64, 32))
    assert models.parameter_count(model) == down + up + 32 + 1 == 7_763_041
    names = set(model.state_dict())  # under which its weights are published
    assert {"encoder1.enc1conv1.weight", "encoder4.enc4norm2.running_var", "upconv3.bias", "conv.weight"} <= names
    assert {"bottleneck.bottleneckconv2.weight", "decoder1.dec1norm1.bias"} <= names
    model = models.build("unet-512", channels=1, outputs=2, size=16).eval()
    x = images(1, 16)
    one = model.encoder1(x)
    two = model.encoder2(model.pool1(one))
    three = model.encoder3(model.pool2(two))
    four = model.encoder4(model.pool3(three))
    up = model.decoder4(torch.cat([model.upconv4(model.bottleneck(model.pool4(four))), four], 1))
    up = model.decoder3(torch.cat([model.upconv3(up), three], 1))
    up = model.decoder2(torch.cat([model.upconv2(up), two], 1))
    up = model.decoder1(torch.cat([model.upconv1(up), one], 1))
    assert torch.equal(model(x), model.conv(up))


def test_batch_norm_names_are_found_by_layer_not_by_spelling():
    model = models.build("small-cnn", channels=1, outputs=2, size=28)
    kinds = ("running_mean", "running_var", "num_batches_tracked")
    statistics = {f"norm{i}.{kind}" for i in (1, 2, 3) for kind in kinds}
    learned = {f"norm{i}.{kind}" for i in (1, 2, 3) for kind in ("weight", "bias")}
    assert models.statistics_names(model) == statistics
    assert models.norm_names(model) == statistics | learned
    resnet = models.build("resnet18", channels=1, outputs=2, size=28)
    assert {n for n in resnet.state_dict() if "running" in n or "tracked" in n} == models.statistics_names(resnet)
    assert {"bn1.weight", "layer2.0.downsample.1.bias"} <= models.norm_names(resnet)
    assert not models.norm_names(models.build("lenet5", channels=1, outputs=2, size=28))


@pytest.mark.parametrize("backbone", QUICK)
def test_initial_weights_depend_on_the_seed_alone(backbone):
    def builder():
        return models.build(backbone, channels=1, outputs=2, size=28)

    before = torch.get_rng_state()
    first = models.initial_weights(builder, 7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    again, other = models.initial_weights(builder, 7), models.initial_weights(builder, 8)
    assert all(torch.equal(first[name], again[name]) for name in builder().state_dict())
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_felicias_classifiers_have_the_papers_layers_counted_by_hand():
    digits = models.build("cnn-32-64-128", channels=1, outputs=10, size=28)
    filters, dense = (9 * 1 + 1) * 32 + (9 * 32 + 1) * 64, (64 * 12 * 12 + 1) * 128  # 28 - 2 - 2 = 24, pooled to 12
    assert models.parameter_count(digits) == filters + dense + (128 + 1) * 10 == 1_199_882
    lesions = models.build("cnn-64-128-64-32", channels=3, outputs=2, size=64)
    filters = (16 * 3 + 1) * 64 + (16 * 64 + 1) * 128 + (16 * 128 + 1) * 64
    dense = (64 * 8 * 8 + 1) * 32  # 64 px, halved three times
    assert models.parameter_count(lesions) == filters + dense + (32 + 1) * 2 == 396_642


@pytest.mark.parametrize(("backbone", "norm", "message"), [
    ("resnet81", "batch", r"model\.backbone: .*did you mean 'resnet18'.*lenet5, resnet101, resnet152, resnet18"),
    ("resnet18", "layer", r"model\.norm: no such choice: 'layer'; choose one of batch, group"),
])  # fmt: skip
def test_a_choice_that_does_not_exist_is_named_with_the_ones_that_do(backbone, norm, message):
    with pytest.raises(BadInput, match=message):
        models.build(backbone, channels=1, outputs=2, size=28, norm=norm)


EVERY_CUT = [(name, cut) for name in QUICK for cut in models.cuts(name)] + [("resnet50", "layer2")]


@cache
def _drawn(backbone: str) -> models.Backbone:
    return models.build(backbone, channels=1, outputs=3, size=31)


def network(backbone: str) -> models.Backbone:
    """The same_tensors network each time, a copy of its own: to draw the weights of a large one takes far longer."""
    return copy.deepcopy(_drawn(backbone))


def other_network(backbone: str) -> models.Backbone:
    """One with other numbers everywhere."""
    model = network(backbone)
    for tensor in model.state_dict().values():
        tensor.add_(1)
    return model


def cut_images() -> torch.Tensor:
    return torch.randn(2, 1, 31, 31, generator=torch.Generator().manual_seed(3))


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("backbone", "cut"), EVERY_CUT)
def test_a_split_network_trains_as_the_whole_and_parts_loaded_apart_join_to_it(backbone, cut):
    whole, model = network(backbone), network(backbone)
    front, rest = models.split(model, cut)
    output = whole(cut_images())
    output.square().sum().backward()

    sent = front(cut_images())
    received = sent.detach().requires_grad_()
    answer = rest(received)
    answer.square().sum().backward()
    sent.backward(received.grad)

    assert torch.equal(answer, output)
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    assert same_tensors({name: p.grad for name, p in model.named_parameters()}, wanted)
    assert same_tensors(model.state_dict(), whole.state_dict())
    wanted = network(backbone).eval()
    front, _ = models.split(other_network(backbone), cut)
    _, rest = models.split(other_network(backbone), cut)
    for part in (front, rest):
        part.load_state_dict({name: wanted.state_dict()[name] for name in part.state_dict()})
    joined = models.join(front.eval(), rest.eval())
    assert not joined.training
    assert torch.equal(joined(cut_images()), wanted(cut_images()))
    assert joined.cuts == wanted.cuts
    assert list(joined.state_dict()) == list(wanted.state_dict())


def test_the_default_cut_and_splitting_draws_no_number_and_leaves_the_model():
    model = network("resnet18")
    front, _ = models.split(model, "relu")
    assert [type(layer).__name__ for layer in front.children()] == ["Conv2d", "BatchNorm2d", "ReLU"]
    assert front(cut_images()).shape == (2, 64, 16, 16)
    assert models.split(model, model.default_cut())[0](cut_images()).shape == (2, 64, 8, 8)
    assert models.build("small-cnn", channels=1, outputs=2, size=28).default_cut() == "conv1"
    model = network("small-cnn").eval()
    state, names = torch.get_rng_state(), list(model.state_dict())
    front, rest = models.split(model, "conv1")
    models.join(front, rest)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(model.state_dict()) == names
    assert model.present == ("conv1", "conv2", "head")
    assert not front.training
    assert front.cuts == ()
    assert rest.cuts == ("conv2",)


def test_an_unknown_cut_and_parts_that_do_not_meet_are_refused():
    with pytest.raises(BadInput, match=r"model\.cut: lenet5 has no cut 'layer1'; choose one of conv1, conv2"):
        models.split(network("lenet5"), "layer1")
    with pytest.raises(BadInput, match=r"no cut 'head'"):
        models.split(network("lenet5"), "head")
    front, _ = models.split(network("small-cnn"), "conv1")
    _, rest = models.split(network("small-cnn"), "conv2")
    with pytest.raises(BadInput, match=r"model\.cut: small-cnn up to 'conv1' and small-cnn from 'head' do not"):
        models.join(front, rest)
    _, foreign = models.split(network("lenet5"), "conv1")
    with pytest.raises(BadInput, match=r"lenet5 from 'conv2'"):
        models.join(front, foreign)
