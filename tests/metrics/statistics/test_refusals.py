"""What statistics refuse, each in a sentence that names the argument at fault."""

from __future__ import annotations

import pytest

from polyclinic.errors import BadInput
from polyclinic.metrics import statistics as s

NAN = float("nan")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (lambda: s.bland_altman([1, 2, 3], [1, 2]), "truth has 2 values for 3 cases"),
        (lambda: s.brier_score([[0.5, 0.6]], [0]), "add up to 1"),
        (lambda: s.brier_score([1.2], [0]), "0 or more"),
        (lambda: s.brier_score([0.5], [2]), "whole numbers from 0 to 1"),
        (lambda: s.calibration_error([0.5], [1], binning="wide"), "no such binning: 'wide'"),
        (lambda: s.fit_temperature([[NAN, 1.0]], [0]), "finite numbers"),
        (lambda: s.apply_temperature([[1.0, 2.0]], 0), "temperature is 0"),
        (lambda: s.conformal_quantile([1.0], 1), "coverage is 1"),
        (lambda: s.ConformalSets.fit([[0.5, 0.5]], [0], score="raps"), "no such conformal score: 'raps'"),
        (lambda: s.ConformalIntervals.fit([1.0, 2.0], [1.0]), "labels has 1 values for 2 cases"),
        (lambda: s.bootstrap_interval(lambda rows: 0.0, 3, patients=[1, 1, 1]), "all cases are of one patient"),
        (lambda: s.bootstrap_interval(lambda rows: 0.0, 3, kind="basic"), "no such bootstrap: 'basic'"),
        (lambda: s.bootstrap_interval(lambda rows: 0.0, 3, patients=[1, 2]), "patients has 2 values for 3 cases"),
        (lambda: s.bootstrap_interval(lambda rows: NAN, 3, draws=5), "the metric is not defined on these cases"),
        (
            lambda: s.weighted_bootstrap(s.regression_metrics([1.0, 2.0], [1.0, 1.0]), 2, patients=["a", "a"]),
            "all cases are of one patient",
        ),
        (lambda: s.mean_interval([1.0]), "give a list of 2 or more numbers"),
        (lambda: s.mean_interval([1.0, NAN]), "not finite numbers"),
        (lambda: s.sensitivity_at_specificity([1, 2], [1, 1]), "positive and negative cases"),
        (lambda: s.sensitivity_at_specificity([1, 2], [1, 0], 95), "specificity is 95"),
        (lambda: s.predictive_values(0.9, 0.9, 2), "prevalence is 2"),
        (lambda: s.compare_with_baseline({"fedavg": {0: 0.5}}, "moon"), "baseline 'moon' is not among fedavg"),
        (lambda: s.paired_test([1.0, 2.0], [1.0, 2.0, 3.0]), "baseline has 3 values for 2 cases"),
        (lambda: s.paired_test([1.0, 2.0], [1.0, 3.0], test="wilcoxon", overlap=0.25), "choose t"),
        (lambda: s.mcnemar([1, 0], [2, 0]), "second must be 0 or 1"),
        (lambda: s.holm([1.5]), "between 0 and 1"),
    ],
)
def test_refusals(asked, words):
    with pytest.raises(BadInput, match=words):
        asked()
