"""Encoders: networks with public weights that nobody trains; a site computes features of its images with them.

One file an encoder, and one line here. They know torch, files and metrics, and nothing of methods or sites. They lie
below `models`, because a backbone may be an encoder with a linear head.
"""

from polyclinic.encoders.base import Encoder
from polyclinic.encoders.efficientnet_lite0 import (
    EfficientNetLite0Encoder,
    EfficientNetLite0Levels,
    EfficientNetLite0Pooled1024,
    EfficientNetLite0Pooled2048,
)
from polyclinic.registry import Registry

ENCODERS: Registry[type[Encoder]] = Registry(
    "polyclinic.encoders",
    {
        "efficientnet-lite0-1280": EfficientNetLite0Encoder,
        "efficientnet-lite0-1024": EfficientNetLite0Pooled1024,
        "efficientnet-lite0-2048": EfficientNetLite0Pooled2048,
        "efficientnet-lite0-levels": EfficientNetLite0Levels,
    },
    base=Encoder,
)

__all__ = ["ENCODERS", "Encoder"]
