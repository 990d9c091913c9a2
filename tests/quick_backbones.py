"""Backbones for tests that go through all of them.

ResNet-50, 101 and 152 take longer than all others together: ResNet-50 is tested by name where its blocks matter, and
the other two are ResNet-50 with more blocks. So is ResNet-34 a ResNet-18 with more blocks.
Those on EfficientNet-Lite0, which enlarges images, have their own tests (tests/models/test_encoders.py).
"""

from polyclinic.models import BACKBONES

DEEP = ("resnet34", "resnet50", "resnet101", "resnet152", "efficientnet-lite0", "unet-efficientnet-lite0")
QUICK = [name for name, kind in BACKBONES.items() if name not in DEEP and not kind.volumes]
