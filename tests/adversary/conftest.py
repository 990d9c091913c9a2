"""The site that the attacks of this folder are tried on."""

from pathlib import Path

import pytest
from attacked_site import Kit


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path / "kit")
