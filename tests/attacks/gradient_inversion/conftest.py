"""Sites that send the gradient of one image each."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def one_image_each(lenet, smooth_images, sent):
    """Eight sites with an image each: (network, images [8, 1, 1, 16, 16], labels [8, 1], parcels)."""
    images = smooth_images(8)[:, None]
    labels = (torch.arange(8) % 5)[:, None]
    return lenet, images, labels, sent(lenet, images, labels)
