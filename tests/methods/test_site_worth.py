"""What each site adds, by hand: the error of a head from sums, values that are exact or sampled, and what is said."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.errors import BadInput
from polyclinic.methods import analytic
from polyclinic.methods.shared.one_round import moments

FEATURES = np.array([[0.5], [1.0], [-1.0]], np.float32)
TARGETS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])


def test_the_error_of_a_head_follows_from_sums():
    """Against one image after the other."""
    head = torch.tensor([[0.25, 0.5], [2.0, -1.0]]).double()
    asked = []

    def solve(sums):
        asked.append(sums.count)
        return head

    held_out = moments(FEATURES, TARGETS)
    train = {name: moments(FEATURES[:count], TARGETS[:count]) for name, count in (("a", 1), ("b", 2), ("c", 3))}
    said = head[0] + torch.from_numpy(FEATURES).double() @ head[1:]
    wanted = -float((said - TARGETS).square().sum()) / 3
    found = analytic.squared_error_value(train, held_out, solve, frozenset({"a", "c"}))
    assert found == pytest.approx(wanted, abs=1e-3)
    assert asked == [4], "the sums of these sites, and of no others"
    nothing = analytic.squared_error_value(train, held_out, solve, frozenset())
    assert nothing == pytest.approx(-4 / 3, abs=1e-3), "zero is said, and four targets are one"
    assert asked == [4]


def test_sites_that_add_their_number_are_worth_it():
    train = {name: moments(FEATURES, TARGETS) for name in ("a", "b")}
    found = analytic.worth_from_sums(train, train, lambda sums: torch.zeros(2, 2).double())
    assert found["how"] == "exact, from the sites' sums; all 4 coalitions"
    assert found["all"] == found["none"] == pytest.approx(-4 / 3, abs=1e-3)
    assert {name: one["shapley"] for name, one in found["sites"].items()} == {"a": 0, "b": 0}
    one_of_them = {"a": SimpleNamespace(count=0), "b": moments(FEATURES, TARGETS)}
    with pytest.raises(BadInput, match=r"data\.validation: no site has validation images"):
        analytic.worth_from_sums(train, {"a": one_of_them["a"]}, None)


def test_what_is_looked_at_is_said():
    assert analytic._coalitions(3) == "all 8 coalitions"
    assert analytic._coalitions(10) == "all 1,024 coalitions"
    assert analytic._coalitions(11) == "200 random orders of the sites"
