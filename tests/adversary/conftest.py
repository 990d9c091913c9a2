"""The site that the attacks of this folder are tried on."""

from pathlib import Path

import pytest
import torch
from attacked_site import Kit


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    torch.manual_seed(0)  # the first weights of networks that attacks begin with
    return Kit(tmp_path / "kit")


@pytest.fixture
def checked(kit, monkeypatch) -> Kit:
    """The kit of a site that inspects what arrives, as every site does unless its people switch that off. Its secret is
    the same in every run of a test, so that its draws are."""
    monkeypatch.setattr("polyclinic.federation.host.secrets.token_hex", lambda count: "5e" * count)
    kit.policy(incoming="on = true")
    return kit
