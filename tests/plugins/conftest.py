"""A plug-in file with one of each, and a study that uses it."""

import shutil
from pathlib import Path

import pytest
from plugin_studies import EVERYTHING, TABLES, forked

from polyclinic.engines import in_process
from polyclinic.study import Study


@pytest.fixture
def plugin(tmp_path) -> Path:
    """A plug-in file beside a study."""
    return Path(shutil.copy(EVERYTHING, tmp_path / "everything.py"))


@pytest.fixture
def study(plugin) -> Study:
    return Study(plugins=[str(plugin)], **TABLES)


@pytest.fixture
def grows_at_once(monkeypatch):
    """`workers = "auto"` starts worker processes at the second call of several sites; each is a process of its own."""
    monkeypatch.setattr(in_process, "PAYS_AFTER", -1.0)
    monkeypatch.setattr(in_process, "cores", lambda: 2)
    return forked(monkeypatch)
