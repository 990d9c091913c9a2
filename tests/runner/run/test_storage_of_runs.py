"""What runs leave on disk and how they are interrupted: pruned states, workers of a killed run, Ctrl-C at any time."""

import functools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import polyclinic
from polyclinic import cli
from polyclinic import run_folder as folder_lock
from polyclinic.errors import BadInput, Damaged
from polyclinic.files import lock
from polyclinic.runner.run import machine
from polyclinic.runner.run.run import run

SOURCES = Path(polyclinic.__file__).parents[1]


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


def ended_by_ctrl_c(places):
    """How to start a command that Ctrl-C ends, also where the tests are a job in the background, which ignores it."""
    takes_it = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return {"env": places, "capture_output": True, "text": True, "preexec_fn": takes_it}


@pytest.mark.parametrize("way", [["-m", "polyclinic"], ["-c", "from polyclinic.__main__ import main; main()"]])
def test_ctrl_c_while_the_command_is_imported(way, tmp_path):
    """A package that makes its own error of an interruption: the command says its sentence all the same."""
    (tmp_path / "typer.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n"
        "    raise ImportError('initialization failed')\n"
    )
    places = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ended = subprocess.run([sys.executable, *way, "list", "methods"], **ended_by_ctrl_c(places))
    assert (ended.returncode, ended.stderr) == (1, "interrupted; nothing was done\n")


@pytest.mark.parametrize("works", [False, True])
def test_a_package_that_swallows_ctrl_c_while_it_is_imported_does_not_stop_it(works, tmp_path):
    """As numpy does: the command would have gone on as if nobody had pressed a key. Where work waits for the package,
    it is interrupted after the import."""
    (tmp_path / "swallows.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    (tmp_path / "command.py").write_text(
        "import sys, time\nfrom polyclinic import cli\ndef app(**_):\n    import swallows\n    time.sleep(60)\n"
        f"cli.app = app\nsys.argv = ['polyclinic']\nif {works}:\n    cli.ROOMS = {str(tmp_path)!r}\ncli.main()\n"
    )
    places = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ended = subprocess.run([sys.executable, tmp_path / "command.py"], **ended_by_ctrl_c(places))
    assert (ended.returncode, ended.stderr) == (1, "interrupted; what was finished is kept\n")


def test_the_command_waits_for_ctrl_c_before_it_imports_anything():
    """Ten milliseconds of imports were ten milliseconds in which Ctrl-C was a traceback."""
    words = "import os, sys; before = set(sys.modules); import polyclinic.__main__; print(set(sys.modules) - before)"
    loaded = subprocess.run([sys.executable, "-S", "-c", words], env={"PYTHONPATH": str(SOURCES)}, capture_output=True)
    assert set(re.findall(r"'(.+?)'", loaded.stdout.decode())) <= {"__future__", "polyclinic", "polyclinic.__main__"}


def test_a_finished_run_with_a_damaged_history_is_not_called_finished(tiny, tmp_path):
    """Found by the fault campaign: `run --resume` looked at result.json only."""
    folder = run(tiny("fedavg"), tmp_path / "run").folder
    history = folder / "history.jsonl"
    history.write_bytes(bytes(40) + history.read_bytes()[40:])
    with pytest.raises(Damaged, match=r"history\.jsonl: is damaged"):
        run(None, folder, resume=True)


HEAVY = ("matplotlib", "nibabel", "pydicom", "opacus", "monai", "ray", "nvflare", "scipy")
PROGRAM = f"""
import sys
import polyclinic.runner.run.worker
print(*[name for name in {HEAVY} if name in sys.modules])
"""


def test_a_worker_imports_nothing_that_most_runs_do_without():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_what_a_user_chose_for_memory_stays(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    assert not machine.keep_freed_memory.__wrapped__()


def test_many_processes_keep_no_more_than_a_share_of_the_memory(monkeypatch):
    values = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 16 * 2**30 // 4096}
    monkeypatch.setattr(machine.os, "sysconf", values.__getitem__)
    found = [machine.kept_at_end(processes) for processes in (1, 16, 10_000)]
    assert found == [machine.KEPT_AT_END, 2**30 // 32, machine.AHEAD]
