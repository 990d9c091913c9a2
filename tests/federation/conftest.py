"""A federation whose sites answer by a script."""

import pytest
from scripted_engine import SITES, Script, weights

from polyclinic.federation.collaborators import FederationSpec
from polyclinic.federation.federation import Federation
from polyclinic.federation.ledger.parcel import Expected


@pytest.fixture
def make(tmp_path):
    def build(act=lambda call: (), sites=SITES, engine=None, **kwargs):
        spec = FederationSpec(
            sites=sites,
            seed=1,
            folder=tmp_path,
            initial_weights=weights,
            expected={"weights": Expected.like("weights", weights(), partial=True)},
            trainer=None,
            **kwargs,
        )
        return Federation(spec, engine or Script(act))

    return build
