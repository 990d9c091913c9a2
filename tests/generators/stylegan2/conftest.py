"""Weights that are the same in every run."""

import pytest
import torch


@pytest.fixture
def same_weights():
    """Layers made without a model draw their weights from torch's own state: the same in every run."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
