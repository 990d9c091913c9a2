"""An audit in seconds: a quick budget that tries next to nothing."""

import json
import shutil
from pathlib import Path

import pytest
from json_schemas import assert_valid
from small_audits import DRAWN, SMALL

from polyclinic.audits import attack_membership, attack_site
from polyclinic.audits import audit as audit_module
from polyclinic.study import tables as audit_settings
from polyclinic.study.tables import Effort

FEW = {
    "sites": 1, "releases": 1, "images": 4, "update_steps": 3, "latent_steps": 3, "projected": 4, "projection_steps": 1,
    "candidates": 20, "generator_steps": 1,
}  # fmt: skip


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch):
    """`hurry(images=2)`: from now on the budget "quick" is very small, but for these changes."""

    def change(**changes: int) -> None:
        monkeypatch.setitem(audit_settings.EFFORTS, "quick", Effort(**{**FEW, **changes}))

    return change


@pytest.fixture
def hurried(hurry, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(projected=6, candidates=25)
    for name in ("PASSES", "STEPS", "HALVINGS"):  # reference models and a planted memory may stay weak here
        monkeypatch.setattr(attack_membership, name, 1)
    monkeypatch.setattr(attack_site, "PASSES", 1)


@pytest.fixture(scope="session")
def finished() -> dict[str, Path]:
    """Folders of audited runs, by study."""
    return {}


@pytest.fixture
def audited(tiny, undisturbed, tmp_path, tmp_path_factory, finished, hurried):
    """`audited("fedavg", rounds=1)`: the report on such a run, and a copy of its folder. A study is audited once."""

    def report_of(method: str, changes: dict | None = None, **method_settings):
        study = tiny(method, {**SMALL, **(changes or {})}, **{"rounds": 1, **method_settings})
        key = json.dumps(study.as_tables(), sort_keys=True)
        if key not in finished:
            folder = tmp_path_factory.mktemp("audited") / method
            shutil.copytree(undisturbed(study).folder, folder)
            with pytest.MonkeyPatch.context() as patch:
                if method not in DRAWN:
                    patch.setattr(audit_module, "draw_plot", lambda draw, path: False)
                audit_module.audit(folder)
            assert_valid(folder)
            finished[key] = folder
        folder = tmp_path / method
        shutil.copytree(finished[key], folder)
        return json.loads((folder / "audit.json").read_text()), folder

    return report_of
