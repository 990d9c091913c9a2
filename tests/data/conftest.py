"""A folder for files of data, and a cache of a test's own."""

import pytest


@pytest.fixture
def root(tmp_path):
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYCLINIC_CACHE", str(tmp_path / "cache"))
