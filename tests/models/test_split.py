"""A network cut in two is the same network, to the last bit, in values and in gradients."""

import copy
from functools import cache

import pytest
import torch
from quick_backbones import QUICK

from polyclinic import models
from polyclinic.errors import BadInput

EVERY_CUT = [(name, cut) for name in QUICK for cut in models.cuts(name)] + [("resnet50", "layer2")]


@cache
def _drawn(backbone: str) -> models.Backbone:
    return models.build(backbone, channels=1, outputs=3, size=31)


def network(backbone: str) -> models.Backbone:
    """The same network each time, a copy of its own: to draw the weights of a large one takes far longer."""
    return copy.deepcopy(_drawn(backbone))


def other_network(backbone: str) -> models.Backbone:
    """One with other numbers everywhere."""
    model = network(backbone)
    for tensor in model.state_dict().values():
        tensor.add_(1)
    return model


def images() -> torch.Tensor:
    return torch.randn(2, 1, 31, 31, generator=torch.Generator().manual_seed(3))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("backbone", "cut"), EVERY_CUT)
def test_split_training_gives_the_unsplit_outputs_gradients_and_statistics(backbone, cut):
    whole, model = network(backbone), network(backbone)
    front, rest = models.split(model, cut)
    output = whole(images())
    output.square().sum().backward()

    sent = front(images())
    received = sent.detach().requires_grad_()
    answer = rest(received)
    answer.square().sum().backward()
    sent.backward(received.grad)

    assert torch.equal(answer, output)
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    assert same({name: p.grad for name, p in model.named_parameters()}, wanted)
    assert same(model.state_dict(), whole.state_dict())


@pytest.mark.parametrize(("backbone", "cut"), EVERY_CUT)
def test_parts_loaded_apart_join_to_the_whole(backbone, cut):
    wanted = network(backbone).eval()
    front, _ = models.split(other_network(backbone), cut)
    _, rest = models.split(other_network(backbone), cut)
    for part in (front, rest):
        part.load_state_dict({name: wanted.state_dict()[name] for name in part.state_dict()})
    joined = models.join(front.eval(), rest.eval())
    assert not joined.training
    assert torch.equal(joined(images()), wanted(images()))
    assert joined.cuts == wanted.cuts
    assert list(joined.state_dict()) == list(wanted.state_dict())


def test_the_default_cut_and_splitting_draws_no_number_and_leaves_the_model():
    model = network("resnet18")
    front, _ = models.split(model, "relu")
    assert [type(layer).__name__ for layer in front.children()] == ["Conv2d", "BatchNorm2d", "ReLU"]
    assert front(images()).shape == (2, 64, 16, 16)
    assert models.split(model, model.default_cut())[0](images()).shape == (2, 64, 8, 8)
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
