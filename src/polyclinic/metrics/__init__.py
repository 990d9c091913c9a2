"""Metrics: PSNR and SSIM, ROC, statistics, distances between sets of images, perceptual distance, and their networks.

A leaf package: it imports errors, files, messages, randomness and settings, and no other room.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyclinic.metrics import statistics as statistics
    from polyclinic.metrics.distribution import efficientnet_features as efficientnet_features
    from polyclinic.metrics.distribution import fidelity as fidelity
    from polyclinic.metrics.distribution import inception_features as inception_features
    from polyclinic.metrics.distribution import precision_recall as precision_recall
    from polyclinic.metrics.perceptual import Pixels as Pixels
    from polyclinic.metrics.perceptual import perceptual_distance as perceptual_distance

#: public name -> the module that it lives in
_HOMES = {
    "Pixels": "metrics.perceptual",
    "efficientnet_features": "metrics.distribution",
    "fidelity": "metrics.distribution",
    "inception_features": "metrics.distribution",
    "perceptual_distance": "metrics.perceptual",
    "precision_recall": "metrics.distribution",
}
__all__ = ["statistics", *_HOMES]


def __getattr__(name: str) -> Any:
    import importlib

    if name == "statistics":
        return importlib.import_module("polyclinic.metrics.statistics")
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"polyclinic.{_HOMES[name]}"), name)
