"""Coarse scores: no small counts, and metrics that are still close to the exact ones."""

import pytest
import torch

from polyclinic.randomness import torch_rng
from polyclinic.tasks.classification import Classification
from polyclinic.tasks.coarse import merge_small, significant, to_multiples
from polyclinic.tasks.regression import Regression
from polyclinic.tasks.task import Target

TWO = Target(("no", "yes"))
#: images of a site, sites, and the mean error of AUC and accuracy that is allowed
COST = [(60, 4, 0.03, 0.02), (100, 4, 0.02, 0.01), (400, 4, 0.01, 0.005)]


def test_numbers_keep_their_first_digits():
    assert significant(torch.tensor([0.0123456, 98765.0, -1.0, 0.0])).tolist() == pytest.approx(
        [0.0123, 98800.0, -1.0, 0.0]
    )


def test_counts_become_multiples():
    assert to_multiples(torch.tensor([0, 2, 3, 7, 8, 12]), 5).tolist() == [0, 0, 5, 5, 10, 10]
    assert to_multiples(torch.tensor([0, 2, 3]), 1).tolist() == [0, 2, 3]


def test_small_bins_join_their_neighbours_by_hand():
    counts = torch.tensor([1, 0, 3, 1, 6, 0, 2, 2])
    # 1 + 3 + 1 reach 5, in four bins; 6 is enough; 2 + 2 are too few and join the 6, in four bins
    assert merge_small(counts, 5).tolist() == [1.25] * 4 + [2.5] * 4
    assert merge_small(counts, 1).tolist() == counts.tolist()
    assert merge_small(counts, 16).tolist() == [0] * 8
    # two bins at a time: 1, 4, 6, 4
    assert merge_small(counts, 1, 2).tolist() == [0.5, 0.5, 2, 2, 3, 3, 2, 2]


@pytest.mark.parametrize(("images", "sites", "auc", "accuracy"), COST)
def test_what_coarse_scores_cost(images, sites, auc, accuracy):
    """Over many draws of sites with so many images: the mean error of pooled metrics at min_cohort 10."""
    task, errors = Classification(), []
    for draw in range(20):
        rng, exact, coarse = torch_rng("coarse", draw), None, None
        for _ in range(sites):
            labels = torch.randint(2, (images,), generator=rng)
            shift = torch.randn(images, 1, generator=rng) + 1.5 * labels[:, None] - 0.75
            logits = torch.cat([-shift, shift], 1).double()
            sums = task.sums(task.observe(logits, labels, TWO), labels, None, TWO)
            less = task.coarse(sums, 10)
            exact = sums if exact is None else task.add(exact, sums)
            coarse = less if coarse is None else task.add(coarse, less)
        before, after = task.finish(exact), task.finish(coarse)
        errors.append([abs(before[name] - after[name]) for name in ("auc", "accuracy")])
    mean = torch.tensor(errors).mean(0)
    assert mean[0] < auc
    assert mean[1] < accuracy


def test_other_tasks_round_their_means():
    target = Target((), "months", (0.0, 10.0))
    labels, outputs = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([[0.123456], [0.2], [0.3]]).double()
    sums = Regression().sums(outputs, labels, None, target)
    coarse = Regression().coarse(sums, 10)
    exact, rounded = Regression().finish(sums), Regression().finish(coarse)
    assert int(coarse["count"]) == 3
    assert rounded["mae"] == pytest.approx(float(f"{exact['mae']:.3g}"))
