"""A head on an encoder computes in float32, also where the study computes in bfloat16."""

from __future__ import annotations

import torch

from polyclinic.models.encoded import _encoded
from polyclinic.models.encoders import Encoder


class Grey(Encoder):
    """The image at 2 x 2 pixels."""

    width = 4
    side = None

    def encode(self, images):
        return torch.nn.functional.adaptive_avg_pool2d(images.mean(1, keepdim=True), 2).flatten(1)


def test_a_difference_of_large_numbers_survives_autocast():
    """Logits 10000.5 and 10000: in bfloat16 both would be 9984."""
    model = _encoded("grey", Grey)(1, 2, 8, "batch").eval()
    weights = {"fc.weight": torch.full((2, 4), 2500.0), "fc.bias": torch.tensor([0.5, 0.0])}
    model.load_state_dict(weights, strict=False)
    images = torch.ones(1, 1, 8, 8)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(images)
    assert output.dtype == torch.float32
    assert output.tolist() == [[10000.5, 10000.0]]
