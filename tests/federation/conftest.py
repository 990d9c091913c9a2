"""A federation whose sites answer by a script."""

from types import SimpleNamespace

import pytest
from plain_study import plain_study
from scripted_engine import SITES, Script, weights

from polyclinic.federation.call import Expected
from polyclinic.federation.collaborators import FederationSpec
from polyclinic.federation.federation import Federation


@pytest.fixture
def make(tmp_path):
    def build(act=lambda call: (), sites=SITES, engine=None, method=None, backbones=None, **settings):
        course = {name: settings.pop(name) for name in ("fraction", "patience") if name in settings}
        if course:
            method = SimpleNamespace(operation_named=lambda name: None, check_reply=lambda *reply: None, **course)
        spec = FederationSpec(
            study=plain_study(method, seed=1, **settings),
            sites=sites,
            folder=tmp_path,
            initial=weights(),
            expected={"weights": Expected.like("weights", weights(), partial=True)},
            trainer=None,
            backbones=backbones or {},
        )
        return Federation(spec, engine or Script(act))

    return build
