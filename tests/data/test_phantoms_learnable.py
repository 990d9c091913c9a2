"""A small network learns every phantom task well above guessing and above a linear model, and not perfectly."""

import runpy
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "lab" / "benchmarks" / "phantoms.py"


@pytest.fixture(scope="module")
def measure():
    return runpy.run_path(str(BENCHMARK))["measure"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fundus", "chest", "skin", "brain-classes"])
def test_classes_are_learnt_but_not_perfectly(name, measure):
    """After 8 epochs the network leads by 0.05 to 0.11 for skin (five seeds), after 16 by 0.10 to 0.14 (three)."""
    row = measure(name, size=32, train_images=1000, test_images=500, epochs=16)
    assert row["guess"] + 0.08 < row["network"] < 0.96
    assert row["network"] > row["linear"] + 0.05


@pytest.mark.slow
def test_bone_age_is_learnt_but_not_perfectly(measure):
    row = measure("hand", size=32, train_images=1000, test_images=500, epochs=8)
    assert 6 < row["network"] < 0.6 * row["guess"]
    assert row["network"] < 0.8 * row["linear"]


@pytest.mark.slow
def test_tumours_are_found_but_not_perfectly(measure):
    row = measure("brain", size=32, train_images=600, test_images=200, epochs=5)
    assert 0.3 < row["network"] < 0.95
    assert row["network"] > row["linear"] + 0.1
