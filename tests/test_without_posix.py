"""Without fcntl, fork, POSIX signals, select on pipes and inherited descriptors, as on Windows: all but deployment.

No Windows machine runs this: `without_posix/sitecustomize.py` hides from polyclinic's modules what Windows lacks, in
every process that is started here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import wait_for
from run_folders import assert_same_run

import polyclinic

HIDING = Path(__file__).parent / "without_posix"
ALL_MODULES = """
import importlib, pkgutil, polyclinic
for module in pkgutil.walk_packages(polyclinic.__path__, "polyclinic."):
    if not module.name.startswith(("polyclinic.deployment", "polyclinic.__main__")):
        importlib.import_module(module.name)
"""


@pytest.fixture
def python(tmp_path):
    """Starts Python without POSIX; gives the process, or waits for it and checks that all went well."""

    def start(*arguments, wait=True):
        places = [str(HIDING), str(Path(polyclinic.__file__).parents[1])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "NO_POSIX_IN": str(tmp_path)}
        environment["POLYCLINIC_CACHE"] = str(tmp_path / "cache")
        command = [sys.executable, *map(str, arguments)]
        output = subprocess.PIPE if wait else subprocess.DEVNULL
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, text=True)
        if wait:
            out, err = process.communicate()
            assert process.returncode == 0, err[-3000:]
            return out
        return process

    return start


@pytest.mark.parametrize(
    "line",
    ["import fcntl", "from os import fork", "import signal; signal.SIGKILL", "import os; os.set_blocking(0, False)"],
)
def test_what_windows_lacks_is_really_hidden(python, line):
    """From polyclinic, and from nobody else."""
    python("-c", line)
    inside = f"exec({line!r}, {{'__name__': 'polyclinic.x', '__builtins__': __builtins__}})"
    with pytest.raises(AssertionError, match=r"is hidden|cannot import name 'fork'"):
        python("-c", inside)


@pytest.mark.parametrize("line", ["file.unlink()", "other.replace(file)", "other.rename(file)", "file.rename(third)"])
def test_a_file_in_use_is_really_protected(python, tmp_path, line):
    places = "from pathlib import Path; file, other, third = map(Path, ('file', 'other', 'third')); other.touch();"
    use = "file.touch(); opened = file.open();"
    with pytest.raises(AssertionError, match="PermissionError"):
        python("-c", f"import os; os.chdir({str(tmp_path)!r}); {places} {use} {line}")


def test_a_study_runs_in_two_workers_is_resumed_audited_and_compared(python, tiny, undisturbed, tmp_path):
    """The run is killed: its workers notice by their pipe, and the resumed run waits for their locks. Then every module
    but those of deployment is imported: one process for all of it, as to start one takes longer than to work."""
    search = {"optimizer": "adam", "iterations": 3, "label": "joint"}  # that it ends is asked, not what it finds
    audited = {"audit.keep_parcels": 1, "audit.gradient_inversion": search}
    study = tiny("fedavg", {**audited, "optimizer.keep_state": True}, rounds=3)
    serial = tiny("cwt", rounds=1)
    (tmp_path / "study.toml").write_text(study.to_toml())
    (tmp_path / "serial.toml").write_text(serial.to_toml())

    def run(workers, *more):
        run = ["run", str(tmp_path / "study.toml"), "--out", str(tmp_path / "run"), "--quiet", *more]
        return [*run, "--set", f"engine.workers={workers}"]

    audit = ["audit", str(tmp_path / "run"), "--budget", "quick", "--quiet"]
    compare = ["compare", str(tmp_path / "serial.toml"), "--methods", "cwt", "--seeds", "1"]
    compare += ["--out", str(tmp_path / "all")]

    def lines(*commands):
        return f"from polyclinic.cli import run_app\nfor one in {commands}:\n    assert run_app(one) == 0, one\n"

    first = python("-c", lines(run(2)), wait=False)
    history = tmp_path / "run" / "history.jsonl"
    wait_for(lambda: (history.exists() and history.read_text()) or first.poll() is not None)
    first.kill()
    first.wait()
    # to start workers again takes seconds
    python("-c", lines(run(1, "--resume"), audit, compare) + ALL_MODULES)
    assert_same_run(tmp_path / "run", undisturbed(study).folder)
    assert json.loads((tmp_path / "run" / "audit.json").read_text())["complete"]
    rows = json.loads((tmp_path / "all" / "comparison.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["cwt"]
    assert_same_run(tmp_path / "all" / "cwt-seed0", undisturbed(serial).folder)
