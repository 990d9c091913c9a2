"""Small rules of methods and sites, each by hand: mutants of them lived until these tests were written."""

import math

import pytest
import torch

from polyclinic.attacks.gradient_inversion.analytic import _whole
from polyclinic.attacks.near_copies import brighten
from polyclinic.methods.feder import mean_prediction
from polyclinic.methods.gaussian_heads import log_priors
from polyclinic.questions.statistics import _p
from polyclinic.randomness import torch_rng


def test_small_rules_by_hand():
    counts = torch.tensor([0, 3, 1])
    assert log_priors(counts)[1:].tolist() == pytest.approx([math.log(0.75), math.log(0.25)])
    assert log_priors(counts, equal=True)[1:].tolist() == [0.0, 0.0]
    assert log_priors(counts)[0] < -50
    assert log_priors(counts, equal=True)[0] < -50
    logits = torch.logit(torch.tensor([[[0.2]], [[0.6]]]))
    assert mean_prediction(logits, values=False).sigmoid().tolist() == [[pytest.approx(0.4)]]
    classes = torch.tensor([[[0.2, 0.8]], [[0.6, 0.4]]]).log()
    assert mean_prediction(classes, values=False).exp().tolist() == [pytest.approx([0.4, 0.6])]
    assert mean_prediction(torch.tensor([[[1.0]], [[3.0]]]), values=True).tolist() == [[2.0]]
    sure = mean_prediction(torch.tensor([[[90.0]], [[90.0]]]), values=False)
    assert 15 < float(sure) < 17, "a logit stays finite"
    assert -17 < float(mean_prediction(torch.tensor([[[-90.0]], [[-90.0]]]), values=False)) < -15
    assert _p((0.0, 0.0, 0.0, 0.0)) == 1.0
    assert _p((0.1, 0.1, 0.1, 0.0)) == 0.0
    assert _p((0.1, 0.0, 0.2, 0.0)) == 0.0
    assert _p((1.0, 1.0, 1.0, 0.0)) == 0.0
    assert _p((1.96, 0.0, 0.0, 1.0)) == pytest.approx(0.05, abs=1e-3)
    assert _p((-1.96, 0.0, 0.0, 1.0)) == pytest.approx(0.05, abs=1e-3)
    assert _whole(torch.zeros(4), 8).tolist() == [2, 2, 2, 2]
    assert _whole(torch.tensor([-1.0, 3.0]), 6).tolist() == [0, 6]
    images = torch.tensor([0.2, 0.9])
    assert brighten(images, 0.4, images, torch_rng("x")).tolist() == pytest.approx([0.6, 1.0])
