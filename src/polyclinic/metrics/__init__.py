"""Metrics: PSNR and SSIM, ROC, statistics, distances between sets of images, perceptual distance, and their networks.

A leaf package: it imports errors, files, messages, randomness and settings, and no other room.
"""

from importlib import import_module
from typing import Any

#: public name -> the module in which it lives
_HOMES = {
    "Pixels": "perceptual", "efficientnet_features": "distribution", "fidelity": "distribution",
    "inception_features": "distribution", "perceptual_distance": "perceptual", "precision_recall": "distribution",
}  # fmt: skip
__all__ = ["statistics", *_HOMES]


def __getattr__(name: str) -> Any:
    if name == "statistics":
        return import_module(f"{__name__}.statistics")
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
