"""Distances by hand, and priors of gradient inversion: public images, statistics that were sent, rounds."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.attacks.gradient_inversion import objective
from polyclinic.attacks.gradient_inversion.networks import LeNet, prepare_for_attack, with_random_weights
from polyclinic.attacks.gradient_inversion.priors import BatchNormPrior, GaussianPrior, batch_statistics
from polyclinic.attacks.gradient_inversion.settings import PRESETS, GradientInversion
from polyclinic.attacks.gradient_inversion.solver import Knowledge
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.randomness import torch_rng

SIDE = 12


def pictures(count: int, name: str) -> Tensor:
    """Cloudy pictures around a common one, as images of one body part are."""
    common = torch.rand(1, 1, 3, 3, generator=torch_rng("priors", "common"))
    coarse = common + 0.2 * torch.randn(count, 1, 3, 3, generator=torch_rng("priors", name))
    return F.interpolate(coarse, SIDE, mode="bilinear").clamp(0, 1)


PUBLIC, TRUTH = pictures(60, "public"), pictures(2, "truth")


class Normed(nn.Module):
    """Two convolutions with batch norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6)
        self.fc = nn.Linear(6 * (SIDE // 2) ** 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn2(self.conv2(self.bn1(self.conv1(x)).sigmoid())).sigmoid()
        return self.fc(x.flatten(1))


def sent_by(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Parcel, dict[str, Tensor]]:
    """Gradients of one step, and the buffers after it."""
    network = copy.deepcopy(model).train()
    loss = F.cross_entropy(network(images), labels)
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    names = [name for name, _ in network.named_parameters()]
    return Parcel("gradients", dict(zip(names, gradients, strict=True)), {}), dict(network.named_buffers())


@pytest.fixture(scope="module")
def normed() -> nn.Module:
    return with_random_weights(Normed(), torch_rng("priors", "network"))


@pytest.fixture(scope="module")
def lenet() -> nn.Module:
    return with_random_weights(LeNet(1, 3, SIDE), torch_rng("priors", "lenet"))


def test_images_like_the_public_ones_are_likely():
    prior = GaussianPrior.of(PUBLIC)
    alike = prior(pictures(20, "others")[:, None])
    noise = prior(torch.rand(20, 1, 1, SIDE, SIDE, generator=torch_rng("priors", "noise")))
    assert float(alike.mean()) < 2
    assert float(noise.min()) > 10 * float(alike.max())


def test_statistics_of_the_very_batch_follow_from_running_ones_and_are_the_true_images(normed):
    _, after = sent_by(normed, TRUTH, torch.tensor([0, 2]))
    found = batch_statistics(normed, after, torch.zeros_like(TRUTH))
    with torch.no_grad():
        seen = normed.conv1(TRUTH)
    mean, variance = found["bn1"]
    torch.testing.assert_close(mean[0], seen.mean((0, 2, 3)), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(variance[0], seen.var((0, 2, 3), correction=0), atol=1e-4, rtol=1e-3)
    assert batch_statistics(normed, {"bn1.running_mean": mean[0]}, TRUTH) is None
    assert batch_statistics(LeNet(1, 3, SIDE), {}, TRUTH) is None
    _, after = sent_by(normed, TRUTH, torch.tensor([0, 2]))
    prior = BatchNormPrior(normed, batch_statistics(normed, after, torch.zeros_like(TRUTH)))
    at_truth, elsewhere = float(prior(TRUTH[None])), float(prior(PUBLIC[None, :2]))
    assert at_truth < 1e-4
    assert elsewhere > 100 * at_truth
    assert float(prior.select_rows(torch.tensor([0]))(TRUTH[None])) == pytest.approx(at_truth, abs=1e-6)
    assert normed.bn1.running_mean is not None  # the network itself is left as it is


def test_sent_statistics_bring_a_batch_back_better(normed):
    """Two images; the statistics of their batch make up for a short search."""
    labels = torch.tensor([0, 2])
    parcel, after = sent_by(normed, TRUTH, labels)
    prior = BatchNormPrior(normed, batch_statistics(normed, after, torch.zeros_like(TRUTH)))
    plain = error_of(normed, [parcel], labels, batch=2)
    helped = error_of(normed, [parcel], labels, batch=2, batch_norm_prior=0.1, known={"batch_norm_prior": prior})
    assert helped < 0.8 * plain


def error_of(
    model, parcels: list[Parcel], labels: Tensor, *, batch: int = 1, known: dict | None = None, **settings
) -> float:
    """The squared error of what a short search from noise finds."""
    usual = {"iterations": 60, "total_variation": 1e-4, "label": "known"}
    attack = PRESETS["geiping"].model_copy(update={**usual, **settings})
    more = {"batch_size": batch, "classes": 3, "labels": labels[None].expand(len(parcels), -1), **(known or {})}
    found = attack.run(parcels, Knowledge(model, (1, SIDE, SIDE), **more), seed=1)
    return float((found.images[0] - TRUTH[:batch]).square().mean())


def test_public_images_bring_an_image_back_better_and_are_asked_for(lenet):
    parcel, _ = sent_by(lenet, TRUTH[:1], torch.tensor([1]))
    plain = error_of(lenet, [parcel], torch.tensor([1]))
    known = {"image_prior": GaussianPrior.of(PUBLIC)}
    helped = error_of(lenet, [parcel], torch.tensor([1]), image_prior=1e-4, known=known)
    assert helped < 0.5 * plain
    parcel, _ = sent_by(lenet, TRUTH[:1], torch.tensor([1]))
    with pytest.raises(BadInput, match=r"attack\.image_prior: has a weight, and needs Knowledge\.image_prior"):
        error_of(lenet, [parcel], torch.tensor([1]), image_prior=0.1)


def test_rounds_of_the_same_image_are_one_question_whose_loss_is_their_mean(lenet):
    """The loss of two rounds together is their mean, and one point is searched for."""
    later = copy.deepcopy(lenet)
    with torch.no_grad():
        for one in later.parameters():
            one.add_(0.1 * torch.randn(one.shape, generator=torch_rng("priors", "later", one.shape[0])))
    label = torch.tensor([1])
    parcels = [sent_by(model, TRUTH[:1], label)[0] for model in (lenet, later)]
    single = [error_of(model, [parcel], label) for model, parcel in zip((lenet, later), parcels, strict=True)]
    joined = error_of([lenet, later], parcels, label, joined=True)
    assert joined < max(single)
    attack = PRESETS["geiping"].model_copy(update={"iterations": 3, "label": "known", "joined": True})
    knowledge = Knowledge([lenet, later], (1, SIDE, SIDE), classes=3, labels=label[None].expand(2, -1))
    assert attack.run(parcels, knowledge).images.shape == (1, 1, 1, SIDE, SIDE)
    simulation = objective.Simulation(prepare_for_attack(lenet))
    sizes = {name: tensor.shape for name, tensor in simulation.weights.items()}
    observed = {name: torch.randn(2, *size, generator=torch_rng("priors", name)) for name, size in sizes.items()}
    labels = objective.FixedLabels(F.one_hot(torch.tensor([[1], [1]]), 3).float())
    rounds = objective.Objective(simulation, observed, labels, image_shape=(1, 1, SIDE, SIDE))
    point = torch.rand(1, SIDE * SIDE, generator=torch_rng("priors", "point"))
    both, gradient = rounds(point.expand(2, -1))
    loss, joined = rounds.of_one_point()(point)
    assert float(loss) == pytest.approx(float(both.mean()), rel=1e-5)
    torch.testing.assert_close(joined[0], gradient.mean(0))


# two layers, of two and of three numbers; one target
OBSERVED = [torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 0.0, 6.0]])]
SIMULATED = [torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 0.0, 6.0]])]  # squared distances 1 and 4


def kernels(*scaled_distances: float) -> float:
    """1 - exp(-D / lambda^2), the i-th layer weighted by 1 / i."""
    return sum((1 - math.exp(-distance)) / (place + 1) for place, distance in enumerate(scaled_distances))


PLAIN, WHOLE = {"variance": 8.0, "scaled": False}, {"kernel": "whole-gradient"}
LENGTHS = math.sqrt(1 + 9 + 36) * math.sqrt(1 + 4 + 4 + 36)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 5.0),
        ({"distance": "gaussian", **PLAIN}, kernels(1 / 8, 4 / 8)),
        ({"distance": "gaussian", "variance": 8.0}, 8 * kernels(1 / 8, 4 / 8)),
        # sample variances are 2 and 12; n times them 4 and 36
        ({"distance": "sapag"}, kernels(1 / 2, 4 / 12)),
        ({"distance": "sapag", "variance_factor": 2}, kernels(1 / 4, 4 / 24)),
        ({"distance": "adaptive-gaussian"}, kernels(1 / 4, 4 / 36)),
        ({"distance": "adaptive-gaussian", "variance_factor": 2}, kernels(1 / 8, 4 / 72)),
        # one kernel for the whole gradient: 1 + 4 = 5, and of all five numbers (mean 2) the variance is 26 / 4
        ({"distance": "gaussian", **PLAIN, **WHOLE}, kernels(5 / 8)),
        ({"distance": "gaussian", "variance": 8.0, **WHOLE}, 8 * kernels(5 / 8)),
        ({"distance": "sapag", **WHOLE}, kernels(5 / (26 / 4))),
        ({"distance": "adaptive-gaussian", **WHOLE}, kernels(5 / (5 * 26 / 4))),
        # along all layers together
        ({"distance": "cosine"}, 1 - (1 + 6 + 36) / LENGTHS),
    ],
    ids=str,
)
def test_distances_by_hand(settings, expected):
    distance = GradientInversion(**settings).distance_from()
    assert distance(OBSERVED)(SIMULATED).item() == pytest.approx(expected, rel=1e-5)


def test_lengths_slopes_and_roughness_by_hand():
    assert objective.cosine(OBSERVED)([3 * layer for layer in OBSERVED]).item() == pytest.approx(0, abs=1e-6)
    a = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([[0.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
    (slope,) = torch.autograd.grad((objective.squared_distance(a, b) * torch.tensor([1.0, 10.0])).sum(), a)
    assert slope.tolist() == [[2.0, 0.0], [40.0, 80.0]]
    picture = torch.tensor([[0.0, 1.0], [0.0, 3.0]])
    assert objective.total_variation(picture[None, None, None]).tolist() == [(0 + 2) / 2 + (1 + 3) / 2]


@pytest.mark.parametrize("name", ["sapag", "adaptive-gaussian"])
def test_layers_without_variance_do_no_harm(name):
    """A pruned layer, and a layer of one number."""
    observed = [torch.zeros(2, 4), torch.ones(2, 1)]
    simulated = [torch.ones(2, 4, requires_grad=True), torch.ones(2, 1, requires_grad=True)]
    loss = objective.DISTANCES[name](observed)(simulated)
    gradients = torch.autograd.grad(loss.sum(), simulated)
    assert bool(loss.isfinite().all())
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_targets_do_not_mix():
    observed = [torch.cat((layer, torch.full_like(layer, torch.nan))) for layer in OBSERVED]
    simulated = [torch.cat((layer, layer)).requires_grad_() for layer in SIMULATED]
    for distance in objective.DISTANCES.values():
        loss = distance(observed)(simulated)
        assert loss[0].item() == distance(OBSERVED)(SIMULATED).item()
        first, second = (g for g in torch.autograd.grad(loss.sum(), simulated)[0])
        assert bool(first.isfinite().all())
        assert not bool(second.isfinite().any())


@pytest.mark.parametrize("scaled", [True, False])
def test_each_target_may_have_a_variance_of_its_own(scaled: bool):
    rng = torch_rng("variances")
    observed, simulated = ([torch.rand(3, n, generator=rng) for n in (4, 6)] for _ in range(2))
    together = objective.gaussian(observed, torch.tensor([0.5, 8.0, 100.0]), scaled=scaled)(simulated)
    for row, variance in enumerate((0.5, 8.0, 100.0)):
        alone = objective.gaussian([o[row : row + 1] for o in observed], variance, scaled=scaled)
        torch.testing.assert_close(together[row], alone([s[row : row + 1] for s in simulated])[0])
