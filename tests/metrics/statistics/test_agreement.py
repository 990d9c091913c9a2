"""Limits of agreement against the example of Bland and Altman (Lancet 1986): two meters of peak flow, 17 persons."""

from __future__ import annotations

import pytest

from polyclinic.errors import BadInput
from polyclinic.metrics.statistics import bland_altman

WRIGHT = [494, 395, 516, 434, 476, 557, 413, 442, 650, 433, 417, 656, 267, 478, 178, 423, 427]
MINI = [512, 430, 520, 428, 500, 600, 364, 380, 658, 445, 432, 626, 260, 477, 259, 350, 451]


def test_published_example():
    found = bland_altman(WRIGHT, MINI)
    assert (found.bias.value, found.deviation, found.n) == (
        pytest.approx(-2.1, abs=0.05),
        pytest.approx(38.8, abs=0.05),
        17,
    )
    assert (found.bias.low, found.bias.high) == (pytest.approx(-22.0, abs=0.1), pytest.approx(17.8, abs=0.1))
    # the paper takes 2 standard deviations: -79.7 and 75.5
    assert found.lower.value == pytest.approx(-79.7 + 0.04 * 38.8, abs=0.1)
    assert found.upper.value == pytest.approx(75.5 - 0.04 * 38.8, abs=0.1)
    # and 3 s^2 / n for the variance of a limit, a reach of 34.6; with the formula of 1999 it is 34.8
    assert found.upper.high - found.upper.value == pytest.approx(34.8, abs=0.1)
    assert found.lower.value - found.lower.low == pytest.approx(34.8, abs=0.1)


def test_sides_exchanged():
    one, other = bland_altman(WRIGHT, MINI), bland_altman(MINI, WRIGHT)
    assert (other.bias.value, other.lower.value) == (pytest.approx(-one.bias.value), pytest.approx(-one.upper.value))
    assert other.lower.low == pytest.approx(-one.upper.high)


def test_lengths_must_agree():
    with pytest.raises(BadInput, match="truth has 2 values for 3 cases"):
        bland_altman([1, 2, 3], [1, 2])
