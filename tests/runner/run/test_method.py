"""A method of a plug-in that raises at the coordinator: one sentence with file and line, exit 1."""

import pytest

from polyclinic.cli import run_app
from polyclinic.errors import BadInput, RunPaused, WorkFailed
from polyclinic.methods.fedavg import FedAvg
from polyclinic.runner.run.method import run_method

PLUGIN = """
from typing import Literal

from polyclinic import FedAvg


class Careless(FedAvg):
    name: Literal["careless"] = "careless"

    def combine(self, federation, state, replies):
        return forgotten({})["weights"]


def forgotten(found):
    return found["weights"]


METHODS = {"careless": Careless}
"""


def test_the_sentence_names_method_file_and_line(tiny, tmp_path, capsys, monkeypatch):
    plugin = tmp_path / "careless.py"
    plugin.write_text(PLUGIN)
    file = tmp_path / "study.toml"
    file.write_text(
        f'plugins = ["careless.py"]\n{tiny("fedavg", rounds=1).to_toml()}'.replace('"fedavg"', '"careless"')
    )
    assert run_app(["run", str(file), "--out", str(tmp_path / "run"), "--quiet"]) == 1
    (said,) = capsys.readouterr().err.strip().splitlines()
    line = PLUGIN.splitlines().index('    return found["weights"]') + 1
    assert said == (
        f"method 'careless' failed at the coordinator in {plugin}, line {line}: KeyError: 'weights'; mend it, or set "
        "POLYCLINIC_TRACEBACK=1 to see all calls"
    )
    monkeypatch.setenv("POLYCLINIC_TRACEBACK", "1")
    assert run_app(["run", "--resume", "--out", str(tmp_path / "run"), "--quiet"]) == 1
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert "in forgotten" in told
    assert said in told


class Raises(FedAvg):
    """A method of this test."""

    def run(self, federation):
        raise federation


@pytest.mark.parametrize("error", [BadInput("no"), WorkFailed("no"), RunPaused("later"), KeyboardInterrupt("stop")])
def test_what_is_meant_for_the_user_or_for_a_pause_passes(error):
    with pytest.raises(type(error), match=str(error)):
        run_method(Raises(), error)


def test_a_failure_outside_the_plugin_names_the_innermost_line():
    with pytest.raises(WorkFailed, match=r"method 'fedavg' failed at the coordinator in .*test_method\.py, line"):
        run_method(Raises(), ValueError("x"))


def test_an_error_of_our_own_method_keeps_its_traceback():
    with pytest.raises(AttributeError):
        run_method(FedAvg(), None)
