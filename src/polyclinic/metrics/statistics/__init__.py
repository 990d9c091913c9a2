"""Statistics of results: intervals, tests between models, calibration, conformal sets, operating points, agreement.

Functions take numpy arrays or CPU tensors. A file each for intervals, significance, delong, calibration, conformal,
operating_points, agreement and case_metrics (metrics of many draws at once). They import metrics.roc, errors and
randomness, and no other room.
"""

from polyclinic.metrics.statistics.agreement import Agreement, bland_altman
from polyclinic.metrics.statistics.calibration import (
    BrierParts,
    apply_temperature,
    brier_parts,
    brier_score,
    calibration_error,
    fit_temperature,
)
from polyclinic.metrics.statistics.case_metrics import classification_metrics, mean_metrics, regression_metrics
from polyclinic.metrics.statistics.conformal import ConformalIntervals, ConformalSets, conformal_quantile
from polyclinic.metrics.statistics.delong import delong_interval, delong_test, delong_variance
from polyclinic.metrics.statistics.intervals import (
    Interval,
    bootstrap_interval,
    bootstrap_intervals,
    mean_interval,
    weighted_bootstrap,
)
from polyclinic.metrics.statistics.operating_points import (
    OperatingPoint,
    predictive_values,
    sensitivity_at_specificity,
)
from polyclinic.metrics.statistics.significance import Difference, compare_with_baseline, holm, mcnemar, paired_test

__all__ = [
    "Agreement",
    "BrierParts",
    "ConformalIntervals",
    "ConformalSets",
    "Difference",
    "Interval",
    "OperatingPoint",
    "apply_temperature",
    "bland_altman",
    "bootstrap_interval",
    "bootstrap_intervals",
    "brier_parts",
    "brier_score",
    "calibration_error",
    "classification_metrics",
    "compare_with_baseline",
    "conformal_quantile",
    "delong_interval",
    "delong_test",
    "delong_variance",
    "fit_temperature",
    "holm",
    "mcnemar",
    "mean_interval",
    "mean_metrics",
    "paired_test",
    "predictive_values",
    "regression_metrics",
    "sensitivity_at_specificity",
    "weighted_bootstrap",
]
