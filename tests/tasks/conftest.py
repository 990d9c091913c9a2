"""Tests here may draw from torch's global state: it is seeded for each of them and put back afterwards."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
