"""Statistics of results: intervals, tests between models, calibration, conformal sets, operating points, agreement.

Functions take numpy arrays or CPU tensors. `disclosure`: what may leave a site; `shapley`: what each of several players
adds.
"""

from importlib import import_module
from typing import Any

#: modules and the public names in each, which are imported when they are asked for
_PUBLIC = {
    "calibration": (
        *("ConformalIntervals", "ConformalSets", "OperatingPoint", "apply_temperature", "calibration_error"),
        *("conformal_quantile", "fit_temperature", "predictive_values", "sensitivity_at_specificity"),
    ),
    "intervals": (
        *("Agreement", "Interval", "bland_altman", "classification_metrics", "mean_interval", "mean_metrics"),
        *("regression_metrics", "weighted_bootstrap"),
    ),
    "significance": (
        *("Difference", "compare_with_baseline", "delong_interval", "delong_test", "delong_variance", "holm"),
        *("mcnemar", "paired_test"),
    ),
}
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
