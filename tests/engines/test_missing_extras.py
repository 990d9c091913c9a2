"""An engine whose extra is not installed is bad input, with the command that installs it."""

import sys

import pytest

from polyclinic.errors import BadInput
from polyclinic.runner.run.run import run


@pytest.mark.parametrize("engine", ["ray", "nvflare"])
def test_the_extra_is_named(tiny, tmp_path, monkeypatch, engine):
    monkeypatch.setitem(sys.modules, engine, None)
    with pytest.raises(BadInput, match=rf"pip install 'polyclinic\[{engine}\]'"):
        run(tiny("fedavg", {"engine.name": engine}), tmp_path / "run")
