"""Encoders: networks with public weights that nobody trains; a site computes features of its images with them.

One file an encoder, and one line here. They know torch and metrics, and nothing of methods or sites.
"""

from polyclinic.encoders.base import Encoder
from polyclinic.encoders.efficientnet_lite0 import EfficientNetLite0Encoder
from polyclinic.registry import Registry

ENCODERS: Registry[type[Encoder]] = Registry(
    "polyclinic.encoders",
    {
        "efficientnet-lite0": EfficientNetLite0Encoder,
    },
    base=Encoder,
)

__all__ = ["ENCODERS", "Encoder"]
