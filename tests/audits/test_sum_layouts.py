"""Second moments and histograms of few images tell who is behind them; of many they do not."""

from __future__ import annotations

import pytest
import torch

from polyclinic.audits.sum_layouts import histogram_scores, leverage, moment_scores
from polyclinic.errors import BadInput
from polyclinic.metrics.roc import auc

FEATURES = 40


def vectors(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed)).relu() + 0.1


def area(count: int) -> float:
    """How well members are told from as many others by the second moments of `count` vectors."""
    inside, outside = vectors(count, 0), vectors(count, 1)
    moments = inside.double().T @ inside.double()
    return auc(moment_scores(moments, inside), moment_scores(moments, outside))


def test_fewer_vectors_than_features_are_all_told():
    assert area(10) == area(30) == 1.0


def test_with_more_vectors_less_is_told():
    few, some, many = area(60), area(200), area(4000)
    assert few > 0.9
    assert few > some > 0.55
    assert abs(many - 0.5) < 0.06


def test_leverage_by_hand():
    """X'X = diag(4, 1): the vectors (2, 0) and (0, 1) have all of an axis each."""
    inside, outside = leverage(torch.diag(torch.tensor([4.0, 1.0, 0.0])), torch.tensor([[2.0, 0, 0], [1.0, 0, 1.0]]))
    assert inside.tolist() == pytest.approx([1.0, 0.25])
    assert outside.tolist() == pytest.approx([0.0, 0.5])


def test_moments_of_other_features_are_refused():
    with pytest.raises(BadInput, match="no square of the 3 features"):
        leverage(torch.eye(2), torch.ones(1, 3))


def test_scores_of_a_small_site_lie_in_its_histogram():
    edges = torch.linspace(-4, 4, 1023)
    rng = torch.Generator().manual_seed(0)
    rounds = [torch.randn(40, generator=rng) for _ in range(2)]  # 20 images that were there, 20 others
    counts = [torch.bucketize(one[:20], edges).bincount(minlength=1024) for one in rounds]
    once, again = (histogram_scores(one, scores, edges) for one, scores in zip(counts, rounds, strict=True))
    twice = once + again
    assert auc(once[:20], once[20:]) > 0.9
    assert auc(twice[:20], twice[20:]) >= auc(once[:20], once[20:])
    flat = histogram_scores(torch.tensor([20]), rounds[0], torch.zeros(0))  # one wide bin tells nothing
    assert auc(flat[:20], flat[20:]) == 0.5
