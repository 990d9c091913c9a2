"""Runs to report on."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def classification(tiny, undisturbed):
    return undisturbed(tiny("fedavg", {"data.samples": 160}, rounds=3)).folder


@pytest.fixture
def copied(classification, tmp_path):
    """A copy that may be changed: nobody has noted its digests."""
    folder = Path(shutil.copytree(classification, tmp_path / "run"))
    (folder / "digests.json").unlink()
    return folder
