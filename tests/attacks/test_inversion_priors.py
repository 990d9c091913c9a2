"""Priors of gradient inversion: public images, batch-norm statistics that were sent, rounds."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.attacks.gradient_inversion.networks import LeNet, prepare_for_attack, with_random_weights
from polyclinic.attacks.gradient_inversion.objective import FixedLabels, Objective, Simulation
from polyclinic.attacks.gradient_inversion.priors import BatchNormPrior, GaussianPrior, batch_statistics
from polyclinic.attacks.gradient_inversion.settings import PRESETS
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
    simulation = Simulation(prepare_for_attack(lenet))
    observed = {
        name: torch.randn(2, *tensor.shape, generator=torch_rng("priors", name))
        for name, tensor in simulation.weights.items()
    }
    labels = FixedLabels(F.one_hot(torch.tensor([[1], [1]]), 3).float())
    rounds = Objective(simulation, observed, labels, image_shape=(1, 1, SIDE, SIDE))
    point = torch.rand(1, SIDE * SIDE, generator=torch_rng("priors", "point"))
    both, gradient = rounds(point.expand(2, -1))
    loss, joined = rounds.of_one_point()(point)
    assert float(loss) == pytest.approx(float(both.mean()), rel=1e-5)
    torch.testing.assert_close(joined[0], gradient.mean(0))
