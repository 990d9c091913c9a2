"""What studies of FedER cannot want is said before anything is run."""

from __future__ import annotations

import pytest
from feder_studies import TABLES, study_of

from polyclinic.errors import BadInput
from polyclinic.study import parse_study


@pytest.mark.parametrize(
    ("given", "changes", "message"),
    [
        ("feder", {"model": {"backbones": {"site-1": "unet"}}}, "model.backbones: 'unet' of site 'site-1' cannot do"),
        ("feder", {"method": {"real_share": 0}}, "method.real_share"),
        ("feder-b", {"method": {"buffer": 0}}, "method.buffer"),
        ("feder", {"generator": {"name": "gann"}}, "generator.name: no such choice"),
    ],
)
def test_what_cannot_work_is_said_before(given, changes, message):
    method = changes.pop("method", None)
    with pytest.raises(BadInput, match=message):
        study_of(given, method, **changes)


def test_networks_that_differ_cannot_be_averaged():
    tables = {**TABLES, "model": {"backbones": {"site-1": "lenet5"}}, "method": {"name": "fedavg"}}
    with pytest.raises(
        BadInput, match=r"model.backbones: 'fedavg' needs the same network at every site; choose one of"
    ):
        parse_study({name: table for name, table in tables.items() if name not in ("tuning", "generator")})


def test_privacy_and_tuning_say_where_they_cannot_be_had():
    with pytest.raises(BadInput, match="chooses when to stop training a generator by real images"):
        parse_study({**study_of().as_tables(), "privacy": {"on": ["classifier"]}})
    with pytest.raises(BadInput, match="tuning: 'vqvae2' is not trained step by step"):
        parse_study({**study_of().as_tables(), "generator": {"name": "vqvae2"}, "tuning": {"alpha": 1}})
    with pytest.raises(BadInput, match="tuning: 'fedavg' trains no generator"):
        parse_study({**TABLES, "method": {"name": "fedavg"}, "tuning": {"alpha": 1}})
