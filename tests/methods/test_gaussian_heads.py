"""Gaussian heads against Gaussian densities by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.distributions import MultivariateNormal, Normal
from torch.nn import functional as F

from polyclinic.errors import BadInput
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods import gaussian_heads
from polyclinic.methods.shared import one_round
from polyclinic.models.encoders import QuadraticHead
from polyclinic.randomness import numpy_rng
from polyclinic.runner.predict.predict import load_predictor

RNG = numpy_rng("gaussian heads")
LABELS = torch.tensor([0] * 300 + [1] * 100)
ROWS = (RNG.standard_normal((400, 3)) * np.where(LABELS[:, None] == 1, [2, 1, 1], [1, 1, 3]) + 5).astype(np.float32)
ROWS[LABELS == 1] += [1, 2, 0]
SHARES = torch.tensor([0.75, 0.25], dtype=torch.float64).log()


def by_class(sums):
    pairs = [sums(ROWS[label == LABELS]) for label in (0, 1)]
    counts = torch.tensor([300, 100])
    return counts, torch.stack([first for first, _ in pairs]), torch.stack([second for _, second in pairs])


def logits_of(weights, diagonal):
    head = QuadraticHead(3, 2, diagonal=diagonal)
    head.load_state_dict({name.removeprefix("fc."): tensor for name, tensor in weights.items()})
    return head(torch.from_numpy(ROWS)).detach().double()


def same_probabilities(logits, wanted):
    assert torch.allclose(logits.softmax(1), wanted.softmax(1), atol=0.002)


def test_naive_bayes_by_hand():
    found = logits_of(gaussian_heads.naive_bayes(*by_class(one_round.sums_and_squares)), diagonal=True)
    rows = torch.from_numpy(ROWS).double()
    parts = [rows[label == LABELS] for label in (0, 1)]
    variances = [own.var(0, correction=0) for own in parts]
    pooled = 0.75 * variances[0] + 0.25 * variances[1]
    wanted = []
    for own, variance in zip(parts, variances, strict=True):
        spread = ((len(own) * variance + 2 * pooled) / (len(own) + 2)).sqrt()
        wanted.append(Normal(own.mean(0), spread).log_prob(rows).sum(1))
    same_probabilities(found, torch.stack(wanted, 1) + SHARES)


def test_quadratic_discriminant_by_hand(monkeypatch):
    monkeypatch.setattr(gaussian_heads, "shrunk", lambda covariance, count: covariance)
    found = logits_of(gaussian_heads.quadratic(*by_class(one_round.sums_and_products)), diagonal=False)
    rows = torch.from_numpy(ROWS).double()
    wanted = []
    for label in (0, 1):
        own = rows[label == LABELS]
        wanted.append(MultivariateNormal(own.mean(0), torch.cov(own.T, correction=0)).log_prob(rows))
    same_probabilities(found, torch.stack(wanted, 1) + SHARES)


@pytest.mark.parametrize("priors", [True, False])
def test_linear_discriminant_by_hand(monkeypatch, priors):
    monkeypatch.setattr(gaussian_heads, "shrunk", lambda covariance, count: covariance)
    sums = one_round.moments(ROWS, F.one_hot(LABELS).double())
    head = gaussian_heads.discriminant(*gaussian_heads.class_moments(sums), priors=priors)
    rows = torch.from_numpy(ROWS).double()
    means = torch.stack([rows[label == LABELS].mean(0) for label in (0, 1)])
    within = torch.cov((rows - means[LABELS]).T, correction=0)
    wanted = torch.stack([MultivariateNormal(mean, within).log_prob(rows) for mean in means], 1)
    same_probabilities(head[0] + rows @ head[1:], wanted + (SHARES if priors else 0))


def test_shrinkage_by_hand():
    covariance = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))
    # OAS with p = 2: trace 4, of the square 10; the share is (0 * 10 + 16) / ((9 + 1 - 1) * (10 - 8))
    share = 16 / 18
    assert gaussian_heads.shrunk(covariance, 9).diag().tolist() == pytest.approx([1 + share, 3 - share])
    assert torch.equal(gaussian_heads.shrunk(torch.eye(2).double(), 5), torch.eye(2).double())


@pytest.mark.parametrize("rule", ["lda", "fisher", "naive-bayes", "qda"])
def test_every_rule_runs_and_does_not_depend_on_the_partition(tiny_run, rule):
    found = [
        tiny_run({"name": "gaussian-heads", "rule": rule}, sites={"partition": "iid", "count": count})
        for count in (1, 3)
    ]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
    assert found[0].metrics["test"]["accuracy"] > 0.5
    told = [any("sums over a class of fewer than 10 images" in one for one in run["warnings"]) for run in found]
    assert told == [False, True]  # 24 images of each class at one site, or 8 at each of three


def test_a_projection_is_for_linear_heads(study_of):
    with pytest.raises(BadInput, match=r"method: numbers: a projection is for rule lda and fisher, not qda"):
        study_of({"name": "gaussian-heads", "rule": "qda", "numbers": 8})


def test_a_quadratic_head_predicts_from_its_file(tiny_run, tmp_path):
    result = tiny_run({"name": "gaussian-heads", "rule": "naive-bayes"})
    Image.fromarray(np.full((28, 28, 3), 90, np.uint8)).save(tmp_path / "scan.png")
    [prediction] = load_predictor(result.folder).predict([tmp_path / "scan.png"])
    shares = [value for value in prediction.values.values() if isinstance(value, float)]
    assert sum(shares) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("rule", ["naive-bayes", "qda"])
@pytest.mark.parametrize(
    ("name", "place", "lie"),
    [("counts", 0, 2**24), ("counts", 0, 2**62), ("counts", 0, 3), ("first", 1, 2**40), ("second", 0, -1)],
)
def test_class_sums_that_no_images_have_are_refused(rule, name, place, lie):
    """Of three sites; the second class has no image."""
    sums = one_round.sums_and_squares if rule == "naive-bayes" else one_round.sums_and_products
    pairs = [sums(numpy_rng("lies").standard_normal((count, 2)).astype(np.float32)) for count in (5, 0)]
    sent = {"counts": torch.tensor([5, 0]), "first": torch.stack([one for one, _ in pairs])}
    sent["second"] = torch.stack([two for _, two in pairs])
    federation = SimpleNamespace(sums=SimpleNamespace(covered=()), chosen=["a", "b", "c"])
    check = gaussian_heads.GaussianHeads(rule=rule).check_class_sums
    check(federation, "give_class_sums", Parcel("statistics", sent, {"samples": 5}))
    wrong = sent | {name: sent[name].clone()}
    wrong[name].view(-1)[place] = lie
    with pytest.raises(ParcelRejected, match="statistics: "):
        check(federation, "give_class_sums", Parcel("statistics", wrong, {"samples": 5}))


@pytest.mark.parametrize("count", [0, 2**24])
def test_class_sums_of_none_or_too_many_images_are_refused_whatever_samples_say(count):
    sent = {"counts": torch.tensor([count, 0]), "first": torch.zeros(2, 2), "second": torch.zeros(2, 2)}
    federation = SimpleNamespace(sums=SimpleNamespace(covered=()), chosen=["a", "b", "c"])
    check = gaussian_heads.GaussianHeads(rule="naive-bayes").check_class_sums
    with pytest.raises(ParcelRejected, match="of no image or of more than"):
        check(federation, "give_class_sums", Parcel("statistics", sent, {"samples": count}))


def test_a_feature_that_never_varies_has_the_least_variance():
    """Four steps of rounding, squared; below that a feature is mostly rounding."""
    rows = np.full((5, 1), 2.0, np.float32)
    first, squares = one_round.sums_and_squares(rows)
    weights = gaussian_heads.naive_bayes(torch.tensor([5, 0]), torch.stack([first] * 2), torch.stack([squares] * 2))
    assert weights["fc.products"][0].tolist() == pytest.approx([-0.5 / (4 / 4096) ** 2])
