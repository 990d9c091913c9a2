"""Attack: move the biases of a dense layer by a small step each round, and subtract the gradients of two rounds.

What is left is the image that a threshold has passed between them. The steps are too small for the incoming check.
"""

import itertools

import pytest
import torch
from attacked_site import SITE, ask

from polyclinic.attacks.crafting import dense_layer, input_of
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.training.image_draws import hold_rows_of_few

ROUNDS = 16
#: how near to an image's input of the layer, in units of the usual distance of two images, a difference is that image
NEAR = 0.1


def sweep(kit):
    """The site's inputs of the dense layer that differences of gradients name, and how many images it has."""
    host = kit.host(model={"backbone": "cnn-64-128-64-32"}, method={"name": "fedsgd", "rounds": ROUNDS})
    weights = host.spec.first_weights(SITE)
    model = host.spec.trainer.model
    model.load_state_dict(weights)
    images = torch.from_numpy(host.sites.get(SITE).data.train.images.copy()).float() / 255
    name, _ = dense_layer(model)
    with torch.no_grad():
        inputs = input_of(model, name)(images)
    step = 2.0 * (inputs @ weights[f"{name}.weight"].T).std() / ROUNDS
    gradients = []
    for number in range(ROUNDS):
        moved = {**weights, f"{name}.bias": weights[f"{name}.bias"] - step * number}
        gradients.append(dict(ask(host, "gradient", number + 1, weights=moved).parcels[0].tensors))
    return named(gradients, name, inputs), len(images)


def named(gradients, layer, inputs):
    """The places of inputs [N, n] that rows of differences are: weight over bias."""
    found: set[int] = set()
    usual = torch.pdist(inputs).median()
    for before, after in itertools.pairwise(gradients):
        weight, bias = (before[f"{layer}.{kind}"] - after[f"{layer}.{kind}"] for kind in ("weight", "bias"))
        passed = bias.abs() > 1e-9
        distance = torch.cdist(weight[passed] / bias[passed, None], inputs) / usual
        found |= set((distance < NEAR).nonzero()[:, 1].tolist())
    return found


@pytest.fixture(autouse=True)
def known_secret(monkeypatch):
    """The same secret in every run of this test, so that its draws are the same."""
    monkeypatch.setattr("polyclinic.federation.host.secrets.token_hex", lambda count: "5e" * count)


@pytest.mark.parametrize("shares", ["equal", "random"])
def test_no_image_is_left_when_two_gradients_are_subtracted(kit, shares):
    kit.policy(incoming="on = true", shares=shares)
    found, images = sweep(kit)
    assert Suspensions(kit.folder).all() == []  # the incoming check sees nothing in either
    assert len(found) <= images // 20 if shares == "random" else len(found) >= images // 3


def test_a_round_that_is_asked_again_with_other_weights_has_other_shares(kit):
    """Else a run that is put back would give two gradients with the same shares to subtract."""
    kit.policy(shares="random")
    host = kit.host(method={"name": "fedsgd", "rounds": 2})
    weights = host.spec.first_weights(SITE)
    nearly = {**weights, "fc3.bias": weights["fc3.bias"] + 1e-6}
    answers = []
    for sent in (weights, nearly, weights):
        answers.append(ask(host, "gradient", 1, weights=sent).parcels[0].tensors["fc3.bias"])
        host.restore({})
    assert torch.equal(answers[0], answers[2])
    assert (answers[0] - answers[1]).norm() > 1e-2 * answers[0].norm()


def test_a_unit_that_answers_to_few_images_of_a_batch_is_held_back():
    layer = torch.nn.Linear(3, 4)
    images = torch.rand(8, 3, generator=torch.Generator().manual_seed(0))
    answers = torch.zeros(8, 4)
    answers[:2, 0] = 1  # of two images
    answers[:3, 1] = 1  # of three
    answers[:5, 2] = torch.tensor([1.0, 0.1, 0.1, 0.1, 0.1])  # of one above all
    answers[:, 3] = torch.tensor([1.0, *[0.01] * 7])  # the same, but all have a gradient
    with hold_rows_of_few(layer):
        (layer(images) * answers).sum().backward()
    assert layer.weight.grad[[0, 2]].abs().max() == 0
    torch.testing.assert_close(layer.weight.grad[[1, 3]], answers.T[[1, 3]] @ images)
