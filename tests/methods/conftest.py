"""Tiny studies, run in a moment."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import felicia_studies
import pytest
from feder_studies import runner
from json_schemas import assert_valid

from polyclinic.methods import METHODS
from polyclinic.models.encoders import ENCODERS
from polyclinic.runner.run.result import Result
from polyclinic.runner.run.run import run
from polyclinic.study import Study, parse_study

TABLES: dict[str, Any] = {
    "data": {"source": "fundus-phantom", "size": 28, "samples": 80, "validation": 0.2, "test": 0.2},
    "sites": {"partition": "label-skew", "count": 3, "target_ks": 0.4},
    "model": {"backbone": "small-cnn"},
    "optimizer": {"lr": 0.05, "batch_size": 8, "augment": ["flip"]},
    "method": {"name": "fedavg", "rounds": 2},
    "evaluation": {"every": 0, "select": "last"},
    "engine": {"workers": 1, "device": "cpu"},
    "generator": {
        "name": "vqvae2",
        "epochs": 1,
        "width": 8,
        "blocks": 1,
        "top_codes": 16,
        "bottom_codes": 16,
        "prior_epochs": 1,
        "prior_width": 8,
        "prior_layers": 1,
    },
}


def tiny_study(method: dict[str, Any], **changes: dict[str, Any]) -> Study:
    """The tiny study with another method; a keyword replaces settings of the table of its name."""
    tables = {name: {**table, **changes.get(name, {})} for name, table in TABLES.items()}
    tables |= {name: table for name, table in changes.items() if name not in TABLES or name == "sites"}
    if "name" in changes.get("generator", {}):  # settings of another generator mean nothing to it
        tables["generator"] = changes["generator"]
    if method["name"] == "felicia" and "generator" not in changes:  # it trains GANs, and no other generator
        tables["generator"] = {"name": "dcgan", "width": 4}
        method = {"steps": 1, "learner_steps": 300, **method}
    traits = METHODS[method["name"]].traits
    if traits.trains == "private head":
        tables.setdefault("privacy", {"noise_multiplier": 1.0})
    if traits.needs_encoder and tables["model"]["backbone"] not in ENCODERS:
        tables["model"] = {"backbone": "efficientnet-lite0-1024", "input_size": 32}
    if method["name"].endswith("-replay"):  # a probe takes longer than all the rest
        tables["replay"] = {"probe": False, **changes.get("replay", {})}
    return parse_study({**tables, "method": {"rounds": 2, **method}})


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("methods-cache")


@pytest.fixture
def study_of() -> Callable[..., Study]:
    """The tiny study with another method, not yet run."""
    return tiny_study


@pytest.fixture(scope="session")
def finished() -> dict[str, Result]:
    """Results of tiny studies, by study."""
    return {}


@pytest.fixture
def tiny_run(tmp_path: Path, cache: Path, finished: dict[str, Result], request) -> Callable[..., Result]:
    """Runs a tiny study, or gives the result of a test that ran the same one: only to be looked at.

    It is run anew where a test changes code (`monkeypatch`), and the second time that one test asks for it.
    """
    count, asked = iter(range(1000)), set()

    def go(method: dict[str, Any], **changes: dict[str, Any]) -> Result:
        study = tiny_study(method, **changes)
        key = json.dumps(study.as_tables(), sort_keys=True)
        if key in finished and key not in asked and "monkeypatch" not in request.fixturenames:
            asked.add(key)
            return finished[key]
        asked.add(key)
        result = run(study, tmp_path / str(next(count)), cache=cache)
        assert_valid(result.folder)
        if "monkeypatch" not in request.fixturenames:
            finished.setdefault(key, result)
        return result

    return go


@pytest.fixture
def no_contact_sheets(monkeypatch):
    """A contact sheet takes longer than all the rest."""
    monkeypatch.setattr("polyclinic.methods.shared.site_generator.contact_sheet", lambda *_: None)


@pytest.fixture
def go(tmp_path, cache):
    """Runs tiny studies of FedER."""
    return runner(tmp_path, cache)


@pytest.fixture
def felicia(tiny, request):
    """Makes small studies of FELICIA, with what differs in a test module: its `CHANGES` of tables, its `SETTINGS`."""
    changes, quick = (getattr(request.module, name, {}) for name in ("CHANGES", "SETTINGS"))
    return lambda tables=None, **method: tiny(
        "felicia",
        {**felicia_studies.STUDY, **changes, **(tables or {})},
        **{**felicia_studies.QUICK, **quick, **method},
    )
