"""What runs leave on disk and how they are interrupted: pruned states, workers of a killed run, Ctrl-C at any time."""

import pytest

from polyclinic import __main__, cli
from polyclinic.errors import BadInput, Damaged
from polyclinic.files import lock
from polyclinic.runner import folder_lock
from polyclinic.runner.run import run


@pytest.mark.slow
def test_without_checkpoints_only_the_newest_state_of_a_site_stays(tiny, tmp_path):
    """Two workers write a state after every call."""
    settings = {"engine.checkpoint_every": 0, "engine.workers": 2, "sites.count": 2, "evaluation.every": 0}
    done = run(tiny("scaffold", settings, rounds=4), tmp_path / "run")
    for site in ("site-1", "site-2"):
        states = list((done.folder / "sites" / site).glob("state-*.safetensors"))
        assert 1 <= len(states) <= 2, states


def test_a_worker_that_does_not_end_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "ENDS_WITHIN", 0.05)
    (tmp_path / folder_lock.WORKERS).mkdir()
    with (
        lock(tmp_path / folder_lock.WORKERS / "4711.lock"),
        pytest.raises(BadInput, match=r"process 4711, a worker of an earlier run, has not ended yet"),
        folder_lock.run_lock(tmp_path),
    ):
        pass


def test_an_error_that_a_package_made_of_ctrl_c_is_an_interruption(monkeypatch, capsys):
    def app(**_):
        raise ImportError("numpy: initialization failed")

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(ImportError):
        cli.run_app(["run"])
    monkeypatch.setattr(cli, "_interrupted", [2])
    assert cli.run_app(["run"]) == 1
    assert capsys.readouterr().err == "interrupted; what was finished is kept\n"


def test_ctrl_c_while_the_command_is_imported(monkeypatch, capsys):
    import builtins

    honest = builtins.__import__

    def interrupted(name, *rest):
        if name == "polyclinic.cli":
            raise KeyboardInterrupt
        return honest(name, *rest)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "interrupted; nothing was done\n"


def test_a_finished_run_with_a_damaged_history_is_not_called_finished(tiny, tmp_path):
    """Found by the fault campaign: `run --resume` looked at result.json only."""
    folder = run(tiny("fedavg"), tmp_path / "run").folder
    history = folder / "history.jsonl"
    history.write_bytes(bytes(40) + history.read_bytes()[40:])
    with pytest.raises(Damaged, match=r"history\.jsonl: is damaged"):
        run(None, folder, resume=True)
