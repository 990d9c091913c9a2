"""An audit in seconds: a quick budget that tries next to nothing."""

import pytest

from polyclinic.study import audit_settings
from polyclinic.study.audit_settings import Effort

FEW = {
    "sites": 1, "releases": 1, "images": 4, "update_steps": 3, "latent_steps": 3, "projected": 4, "projection_steps": 1,
    "candidates": 20,
}  # fmt: skip


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch):
    """`hurry(images=2)`: from now on the budget "quick" is very small, but for these changes."""

    def change(**changes: int) -> None:
        monkeypatch.setitem(audit_settings.EFFORTS, "quick", Effort(**{**FEW, **changes}))

    return change
