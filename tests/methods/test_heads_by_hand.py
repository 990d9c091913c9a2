"""Heads in closed form: their rules against plain loops, their limits, and what does not change them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.errors import WorkFailed
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.analytic import PENALTIES, best_penalty, solve, within_training
from polyclinic.methods.fedpft import FedPFT, Mixture, fit
from polyclinic.methods.private_head import PrivateHead, clipped_sum
from polyclinic.methods.shared import one_round
from polyclinic.methods.shared.one_round import RESOLUTION
from polyclinic.randomness import numpy_rng, torch_rng

# --- ridge regression -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(12))
def test_the_penalty_has_the_lowest_score_of_cross_validation(number):
    """(RSS / n) / (1 - degrees of freedom / n)^2, from the hat matrix of 9 to 31 images."""
    rng = numpy_rng("scores", number)
    count, width = 9 + 2 * number, 5
    features = rng.standard_normal((count, width)) * [1, 1, 2, 3, 0.5]
    targets = features[:, :2] * (0.2 + number / 6) + rng.standard_normal((count, 2))
    rows, goal = (features - features.mean(0)) / features.std(0), targets - targets.mean(0)

    def score(penalty: float) -> float:
        hat = rows @ np.linalg.solve(rows.T @ rows + penalty * count * np.eye(width), rows.T)
        return float(((goal - hat @ goal) ** 2).sum() / count / (1 - (np.trace(hat) + 1) / count) ** 2)

    values, vectors = torch.linalg.eigh(torch.from_numpy(rows.T @ rows / count))
    turned = vectors.T @ torch.from_numpy(rows.T @ goal / count)
    assert best_penalty(values, turned, float((goal**2).sum() / count), count) == min(PENALTIES, key=score)


def test_sums_give_the_penalty_of_the_images_that_they_are_of():
    """Targets with a mean of about 1, and features of different units."""
    rng = numpy_rng("penalty of sums")
    features = (rng.standard_normal((30, 4)) * [1, 2, 3, 0.5] + [5, 0, -2, 1]).astype(np.float32)
    targets = 1 + 0.3 * (features[:, :1] - 5) + 0.4 * rng.standard_normal((30, 1))
    rows, goal = (features - features.mean(0)) / features.std(0), targets - targets.mean(0)

    def score(penalty: float) -> float:
        hat = rows @ np.linalg.solve(rows.T @ rows + penalty * 30 * np.eye(4), rows.T)
        return float(((goal - hat @ goal) ** 2).mean() / (1 - (np.trace(hat) + 1) / 30) ** 2)

    penalty, _ = solve(one_round.moments(features, torch.from_numpy(targets)), None)
    assert penalty == min(PENALTIES, key=score)
    assert PENALTIES[0] < penalty < PENALTIES[-1]


def test_sums_of_too_many_images_are_not_added():
    def sums(count):
        return one_round.Moments(torch.tensor([count]), torch.zeros(1, 1), torch.zeros(1))

    assert (sums(one_round.MOST_IMAGES - 3) + sums(3)).count == one_round.MOST_IMAGES
    with pytest.raises(WorkFailed, match="can overflow"):
        sums(one_round.MOST_IMAGES - 3) + sums(4)


def test_a_penalty_that_leaves_no_freedom_is_not_scored():
    """Five features of six images: with next to no penalty the head passes through all targets."""
    rng = numpy_rng("interpolation")
    rows = rng.standard_normal((6, 5))
    rows = (rows - rows.mean(0)) / rows.std(0)
    goal = rng.standard_normal((6, 1))
    goal -= goal.mean(0)
    values, vectors = torch.linalg.eigh(torch.from_numpy(rows.T @ rows / 6))
    turned = vectors.T @ torch.from_numpy(rows.T @ goal / 6)
    chosen = best_penalty(values, turned, float((goal**2).mean()) - 1e-12, 6)  # as rounding leaves it
    freedom = float((values / (values + chosen)).sum()) + 1
    assert freedom / 6 < 0.99


def test_a_feature_that_varies_less_than_four_steps_of_rounding_is_left_out():
    """Two values that are 8 steps apart have a deviation of 4 steps, 9 one of 4.5."""
    steps = np.array([[0, 0, 0], [8, 9, 9000]] * 20) * RESOLUTION
    targets = torch.arange(40).double()[:, None] % 2
    _, head = solve(one_round.moments(steps.astype(np.float32), targets), 0.1)
    assert head[1].tolist() == [0.0]
    assert float(head[2]) > 1
    assert 0 < float(head[3]) < 1


def test_far_more_validation_images_than_training_images_are_not_believed():
    def sums(count):
        return SimpleNamespace(count=count)

    most = 10 * 7 + 100  # ten times as many, and a hundred more
    failed = []
    federation = SimpleNamespace(note_failures=failed.extend)
    train = {site: sums(7) for site in ("north", "south", "west")}
    held_out = {"north": sums(most), "south": sums(most + 1), "west": sums(1)}
    assert within_training(federation, train, held_out).keys() == {"north", "west"}
    assert [failure.site for failure in failed] == ["south"]
    assert f"{most + 1} validation images beside 7 training images" in failed[0].reason


# --- mixtures ---------------------------------------------------------------------------------------


def steps_by_hand(rows, means, iterations):
    """Expectation-maximisation, one row and one component after the other."""
    count = len(rows)
    variance = rows.var(0)
    shares, variances = np.full(len(means), 1 / len(means)), np.stack([variance] * len(means))
    for _ in range(iterations):
        weights = np.zeros((count, len(means)))
        for place, row in enumerate(rows):
            densities = [
                share * np.prod(np.exp(-((row - m) ** 2) / (2 * v)) / np.sqrt(2 * np.pi * v))
                for share, m, v in zip(shares, means, variances, strict=True)
            ]
            weights[place] = np.array(densities) / sum(densities)
        sizes = weights.sum(0)
        means = np.stack([(w[:, None] * rows).sum(0) / w.sum() for w in weights.T])
        own = np.stack([(w[:, None] * (rows - m) ** 2).sum(0) for w, m in zip(weights.T, means, strict=True)])
        variances = (own + 2 * variance) / (sizes[:, None] + 2)  # two images' worth of the variance of all
        shares = sizes / count
    return shares, means, variances


def test_a_mixture_is_fitted_step_by_step():
    rows = torch.randn(14, 2, generator=torch_rng("rows"), dtype=torch.float64) + torch.arange(14)[:, None] % 2 * 3
    start = rows[torch.randperm(14, generator=torch_rng("start"))[:3]]
    found = fit(rows, 3, 4, torch_rng("start"))
    wanted = steps_by_hand(rows.numpy(), start.numpy(), 4)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-6)


@pytest.mark.parametrize("components", [1, 2])
def test_a_number_that_never_varies_keeps_a_variance(components):
    """A deviation of about four steps of rounding; without it a density would divide by zero."""
    rows = torch.tensor([[2.0, float(place)] for place in range(20)], dtype=torch.float64)
    found = fit(rows, components, 3, torch_rng("flat"))
    assert ((found.variances[:, 0].sqrt() / RESOLUTION).round() == 4).all()
    assert (found.variances[:, 1] > 1).all()


def test_a_component_of_no_share_has_next_to_no_density():
    mixture = Mixture(torch.tensor([0.0, 1.0]).double(), torch.zeros(2, 1).double(), torch.ones(2, 1).double())
    none, one = mixture.log_densities(torch.zeros(1, 1).double())[0].tolist()
    assert -1000 < none < -60
    assert one == pytest.approx(-0.5 * np.log(2 * np.pi))


def mixtures_of(monkeypatch, counts, least, components=3):
    """What a site sends: features of classes with so many images, in groups of ten that lie far apart."""
    rows = [np.linspace(0, 1, count)[:, None] + 50 * (np.arange(count) // 10)[:, None] for count in counts]
    labels = np.repeat(np.arange(len(counts)), counts)
    monkeypatch.setattr(FedPFT, "features", lambda self, site: np.concatenate(rows))
    monkeypatch.setattr("polyclinic.methods.fedpft.check_classes", lambda site: None)
    target = SimpleNamespace(classes=tuple("abcd"[: len(counts)]))
    site = SimpleNamespace(
        data=SimpleNamespace(train=SimpleNamespace(labels=labels)),
        trainer=SimpleNamespace(target=target),
        min_cohort=least,
        rng=torch_rng,
    )
    return FedPFT(components=components, iterations=20).give_mixtures(site)


def test_a_component_has_ten_images_or_as_many_as_the_policy_wants(monkeypatch):
    sent = mixtures_of(monkeypatch, [9, 20, 59, 0], least=0)
    assert sent.metadata == {"samples": 88, "counts": [9, 20, 59, 0]}
    assert [len(sent.tensors[f"{label}/shares"]) for label in (0, 1, 2)] == [1, 2, 3]
    assert not any(name.startswith("3/") for name in sent.tensors)
    coarse = mixtures_of(monkeypatch, [9, 20, 59, 0], least=20)
    assert [len(coarse.tensors[f"{label}/shares"]) for label in (0, 1, 2)] == [1, 1, 2]


def test_no_component_is_of_fewer_images_than_the_policy_wants(monkeypatch):
    for seed in range(4):
        sent = mixtures_of(monkeypatch, [39 + seed, 57], least=12, components=4)
        for label, count in enumerate((39 + seed, 57)):
            shares = sent.tensors[f"{label}/shares"]
            assert len(shares) == 1 or float(shares.min()) * count >= 12 - 1e-3


# --- the private head -------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["give_gradient", "give_shared_gradient", "give_share_of_sum"])
def test_a_reply_says_of_how_many_images_its_sum_is(operation):
    head = {"head": torch.zeros(1, 3)}
    call = SimpleNamespace(operation=operation, parcels={"statistics": Parcel("statistics", head)})

    def reply(**metadata):
        parcel = Parcel("gradients", head, metadata)
        return SimpleNamespace(site="north", parcel=lambda kind: parcel, parcels=(parcel,), metadata=metadata)

    PrivateHead().check_reply(None, call, reply(expected=4.0))
    with pytest.raises(ParcelRejected, match=r"does not say how many images it is of \('expected'\)"):
        PrivateHead().check_reply(None, call, reply(samples=4))


@pytest.mark.parametrize("patients", [None, torch.tensor([0, 1, 2])])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_an_image_without_a_finite_gradient_adds_nothing(patients, wrong):
    """Gradients (3, 4) and (0.3, 0.4) beside one that is not finite, in its slope or in its vector."""
    slopes, vectors = torch.tensor([[1.0], [wrong], [0.1]]), torch.tensor([[3.0, 4.0]] * 3)
    assert clipped_sum(slopes, vectors, 1.0, patients).flatten().tolist() == pytest.approx([0.9, 1.2])
    slopes, vectors = torch.tensor([[1.0], [1.0], [0.1]]), torch.tensor([[3.0, 4.0], [wrong, 1.0], [3.0, 4.0]])
    assert clipped_sum(slopes, vectors, 1.0, patients).flatten().tolist() == pytest.approx([0.9, 1.2])


# --- one round --------------------------------------------------------------------------------------
