"""Statistics of results: intervals, tests between models, calibration, conformal sets, operating points, agreement.

Functions take numpy arrays or CPU tensors. `safe`: what may leave a
site; `shapley`: what each of several players adds. They import metrics.roc, errors and
randomness, and no other room.
"""

from polyclinic.metrics.statistics.calibration import (
    ConformalIntervals,
    ConformalSets,
    OperatingPoint,
    apply_temperature,
    calibration_error,
    conformal_quantile,
    fit_temperature,
    predictive_values,
    sensitivity_at_specificity,
)
from polyclinic.metrics.statistics.intervals import (
    Agreement,
    Interval,
    bland_altman,
    classification_metrics,
    mean_interval,
    mean_metrics,
    regression_metrics,
    weighted_bootstrap,
)
from polyclinic.metrics.statistics.significance import (
    Difference,
    compare_with_baseline,
    delong_interval,
    delong_test,
    delong_variance,
    holm,
    mcnemar,
    paired_test,
)

__all__ = [
    "Agreement",
    "ConformalIntervals",
    "ConformalSets",
    "Difference",
    "Interval",
    "OperatingPoint",
    "apply_temperature",
    "bland_altman",
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
