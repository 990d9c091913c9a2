"""Operating points against scikit-learn's ROC curve; predictive values by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_curve
from statsmodels.stats.proportion import proportion_confint

from polyclinic.errors import BadInput
from polyclinic.metrics.statistics import predictive_values, sensitivity_at_specificity


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.9, 0.95, 0.5]), st.sampled_from([5, 1000]))
def test_sensitivity_is_the_highest_on_scikit_learns_curve(seed, specificity, levels):
    rng = np.random.default_rng(seed)
    truth = np.append(rng.integers(0, 2, 60), [0, 1])
    scores = rng.integers(0, levels, 62) + levels // 3 * truth
    found = sensitivity_at_specificity(scores, truth, specificity)
    false, true, _ = roc_curve(truth, scores, drop_intermediate=False)
    assert found.sensitivity.value == pytest.approx(true[1 - false >= specificity - 1e-9].max())
    assert found.specificity.value >= specificity - 1e-9


def test_operating_point_by_hand():
    found = sensitivity_at_specificity([0.9, 0.8, 0.35, 0.1, 0.2, 0.3, 0.4, 0.5], [1, 1, 1, 0, 0, 0, 0, 0], 0.8)
    assert found.threshold == 0.4
    assert (found.sensitivity.value, found.specificity.value) == (pytest.approx(2 / 3), 0.8)
    expected = proportion_confint(2, 3, method="beta")
    assert (found.sensitivity.low, found.sensitivity.high) == pytest.approx(expected, abs=1e-9)


def test_predictive_values_by_hand():
    # of 1000 patients 100 are ill: 90 found and 10 missed; of 900 others 45 false alarms
    assert predictive_values(0.9, 0.95, 0.1) == pytest.approx((90 / 135, 855 / 865))
    assert predictive_values(0.5, 0.5, 0.3) == pytest.approx((0.3, 0.7))  # a coin tells nothing
    assert math.isnan(predictive_values(0.0, 1.0, 0.5)[0])


def test_what_makes_no_operating_point_is_refused():
    with pytest.raises(BadInput, match="positive and negative cases"):
        sensitivity_at_specificity([1, 2], [1, 1])
    with pytest.raises(BadInput, match="specificity is 95"):
        sensitivity_at_specificity([1, 2], [1, 0], 95)
    with pytest.raises(BadInput, match="prevalence is 2"):
        predictive_values(0.9, 0.9, 2)
