"""What statistics refuse, each in a sentence that names the argument at fault."""

import numpy as np
import pytest

from polyclinic.errors import BadInput
from polyclinic.metrics import statistics as s

NAN = float("nan")


def bootstrap(cases=3, **options):
    return s.weighted_bootstrap(s.mean_metrics({"x": np.arange(float(cases))}), cases, **options)


@pytest.mark.parametrize(("asked", "words"), [
    (lambda: s.bland_altman([1, 2, 3], [1, 2]), "truth"),
    (lambda: s.calibration_error([[0.5, 0.6]], [0]), "add up to 1"),
    (lambda: s.calibration_error([1.2], [0]), "0 or more"),
    (lambda: s.calibration_error([0.5], [2]), "whole numbers from 0 to 1"),
    (lambda: s.fit_temperature([[NAN, 1.0]], [0]), "finite"),
    (lambda: s.apply_temperature([[1.0, 2.0]], 0), "temperature"),
    (lambda: s.conformal_quantile([1.0], 1), "coverage"),
    (lambda: s.ConformalSets.fit([[0.5, 0.5]], [0], score="raps"), "raps"),
    (lambda: s.ConformalIntervals.fit([1.0, 2.0], [1.0]), "labels"), (lambda: bootstrap(1), "two cases"),
    (lambda: bootstrap(patients=[1, 1, 1]), "one patient"), (lambda: bootstrap(kind="basic"), "basic"),
    (lambda: bootstrap(patients=[1, 2]), "patients has 2 values for 3 cases"),
    (lambda: s.mean_interval([1.0]), "2 or more"), (lambda: s.mean_interval([1.0, NAN]), "finite"),
    (lambda: s.sensitivity_at_specificity([1, 2], [1, 1]), "positive and negative"),
    (lambda: s.sensitivity_at_specificity([1, 2], [1, 0], 95), "specificity"),
    (lambda: s.predictive_values(0.9, 0.9, 2), "prevalence"),
    (lambda: s.compare_with_baseline({"fedavg": {0: 0.5}}, "moon"), "moon"),
    (lambda: s.paired_test([1.0, 2.0], [1.0, 2.0, 3.0]), "baseline"),
    (lambda: s.paired_test([1.0, 2.0], [1.0, 3.0], test="wilcoxon", overlap=0.25), "choose t"),
    (lambda: s.mcnemar([1, 0], [2, 0]), "second"), (lambda: s.holm([1.5]), "between 0 and 1"),
    (lambda: s.delong_test([3, 4, 1, 2], [1, 2, 3, 4], [1, 1, 0, 0]), "McNemar"),
    (lambda: s.delong_variance([1, 2, 3], [1, 1, 0]), "two positive and two negative"),
])  # fmt: skip
def test_refusals(asked, words):
    with pytest.raises(BadInput, match=words):
        asked()
