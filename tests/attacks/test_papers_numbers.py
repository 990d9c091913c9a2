"""Numbers of the papers, of torch, or of a distribution that attacks take over as they are."""

import inspect
import math

import pytest
import torch

from polyclinic.attacks import near_copies
from polyclinic.attacks import near_copies as planted_copies
from polyclinic.attacks.gradient_inversion.networks import SPREAD, LeNet, UnstridedResNet18, resnet18_of_the_papers
from polyclinic.attacks.gradient_inversion.settings import PRESETS
from polyclinic.attacks.gradient_inversion.simulation import LocalTraining
from polyclinic.attacks.membership import rmia
from polyclinic.attacks.scoring import non_converging
from polyclinic.attacks.solvers import optimizers as adam
from polyclinic.attacks.solvers import optimizers as lbfgs


def defaults(function):
    found = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in found if one.default is not inspect.Parameter.empty}


def test_searches_have_torchs_own_settings():
    ours, torchs = defaults(lbfgs.LBFGS), defaults(torch.optim.LBFGS)
    pairs = {"lr": "lr", "inner": "max_iter", "history": "history_size"}
    pairs |= {name: name for name in ("tolerance_grad", "tolerance_change")}
    assert {name: ours[name] for name in pairs} == {name: torchs[other] for name, other in pairs.items()}
    assert ours["steps"] == 100
    torchs = defaults(torch.optim.Adam)
    assert (adam.BETAS, adam.EPS, defaults(adam.Adam)["lr"]) == (torchs["betas"], torchs["eps"], torchs["lr"])
    assert {name: defaults(adam.Adam)[name] for name in ("steps", "weight_decay", "decay", "tolerance_grad")} == {
        **{"steps": 5000, "weight_decay": 0.0, "decay": 1.0, "tolerance_grad": 0.0}
    }


def test_presets_are_those_of_the_papers():
    assert (PRESETS["dlg"].lr, PRESETS["idlg"].lr, PRESETS["sapag"].iterations) == (1.0, 1.0, 5000)
    geiping = PRESETS["geiping"]
    assert (geiping.total_variation, geiping.lr, geiping.iterations) == (0.01, 0.1, 4800)
    assert geiping.decay_at == (0.375, 0.625, 0.875)
    assert (PRESETS["dlg"].iterations, PRESETS["dlg"].decay, PRESETS["dlg"].restarts) == (100, 0.1, 1)


def test_networks_are_those_of_the_papers():
    """DLG's LeNet on CIFAR-100: 12 channels of 5x5 kernels, 768 numbers before the last layer."""
    shapes = {name: tuple(one.shape) for name, one in LeNet().named_parameters() if name.endswith("weight")}
    assert shapes == {
        **{"conv1.weight": (12, 3, 5, 5), "conv2.weight": (12, 12, 5, 5), "conv3.weight": (12, 12, 5, 5)},
        "fc.weight": (100, 768),
    }
    assert LeNet()(torch.zeros(1, 3, 32, 32)).shape == (1, 100)
    assert LeNet(1, 2, 30).fc.in_features == 12 * 8 * 8  # sides are rounded up
    widths = (64, 128, 256, 512)
    assert defaults(UnstridedResNet18) == {"channels": 3, "classes": 100, "size": 32, "widths": widths}
    assert defaults(resnet18_of_the_papers) == {"widths": widths}
    assert SPREAD == 0.5


def test_a_site_that_says_nothing_else_takes_one_plain_step():
    assert {"steps": 1, "momentum": 0.0, "weight_decay": 0.0, "proximal": 0.0}.items() <= defaults(
        LocalTraining
    ).items()


def test_an_image_with_an_error_of_two_did_not_converge():
    error, before = torch.tensor([1.9, 2.0, 0.5, 0.5, math.nan]), torch.tensor([9.0, 9.0, 0.6, 0.5, 9.0])
    assert non_converging(error, before).tolist() == [False, True, False, True, True]


def test_rmia_asks_who_is_at_least_as_likely():
    assert defaults(rmia)["gamma"] == 1.0


def test_quantiles_of_the_logistic_distribution():
    """Half of all |x| lie below the first and nine of ten below the second: P(|x| < t) = tanh(t / 2)."""
    assert math.tanh(near_copies.MEDIAN / 2) == pytest.approx(0.5)
    assert math.tanh(near_copies.NINTH_DECILE / 2) == pytest.approx(0.9)


def test_views_of_a_search_for_copies():
    views = [(view.before, view.after) for view in near_copies.VIEWS if view.quarter is None]
    assert views == [(0.0, 0.0), (0.0, 1.0), (0.0, 1.5), (1.0, 1.0), (2.0, 2.0)]
    assert [view.quarter for view in near_copies.VIEWS[5:]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert near_copies.VIEWS[2].blur == 1.5
    assert near_copies.VIEWS[4].blur == 0.0
    assert (near_copies.LEVEL, near_copies.FEWEST, near_copies.REACH) == (0.001, 20, 8)


def test_levels_of_planted_copies_and_when_they_count_as_found():
    assert (planted_copies.FOUND, planted_copies.PLANTED) == (0.8, 12)
    assert {name: ladder.levels for name, ladder in planted_copies.LADDERS.items()} == {
        "mirrored": (1.0,),
        "shifted": (0.03, 0.06, 0.09, 0.12, 0.15),
        "brighter": (0.1, 0.2, 0.3, 0.4),
        "blurred": (0.01, 0.02, 0.03, 0.045, 0.06),
        "noisy": (0.02, 0.05, 0.1, 0.2),
        "mixed": (0.1, 0.2, 0.3, 0.4),
        "pasted": (0.2, 0.35, 0.5),
    }
