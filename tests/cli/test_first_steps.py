"""What a new user meets first: the doctor, help, completion, cleaning the cache, Ctrl-C, and quick commands."""

import json
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import typer.main

from polyclinic.cli import doctor as doctors
from polyclinic.cli import run_app
from polyclinic.cli.app import app
from polyclinic.cli.doctor import examine
from polyclinic.data.cache import entries

ABOUT = ["Python", "torch", "memory", "disk", "cache", "extras", "ports", "clock", "permissions"]


def test_the_doctor_looks_at_everything_and_says_what_to_do(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run_app(["doctor", "--quick", "--json"]) == 0
    assert [one["about"] for one in json.loads(capsys.readouterr().out)] == ABOUT
    assert [one.about for one in examine(quick=False)] == ["Python", "torch", "GPU", *ABOUT[2:]]


@pytest.mark.parametrize(
    ("change", "about", "state", "words"),
    [
        (("OLDEST_PYTHON", (9, 0)), "Python", "wrong", "install Python 9.0 or newer"),
        (("LEAST_DISK", 1e30), "disk", "wrong", "`polyclinic data clean` empties the cache"),
        (("LEAST_MEMORY", 1e30), "memory", "note", "set engine.workers = 1"),
        (("EXTRAS", {"cluster": ("no_such_module", "clusters")}), "extras", "note", "not installed: cluster: clusters"),
        (("_is_free", lambda port: False), "ports", "note", "needs another --port"),
        (("_nearest", None), "disk", "wrong", "cannot be looked at: TypeError"),
    ],
)
def test_the_doctor_finds_what_is_wrong(capsys, monkeypatch, change, about, state, words):
    monkeypatch.setattr(doctors, *change)
    (found,) = [one for one in examine(quick=True) if one.about == about]
    assert found.state == state
    assert words in found.words
    assert run_app(["doctor", "--quick"]) == (1 if state == "wrong" else 0)


def test_the_doctor_finds_a_cache_and_a_folder_that_cannot_be_written(monkeypatch):
    monkeypatch.setattr(doctors.os, "access", lambda *_: False)
    assert "set POLYCLINIC_CACHE to a folder that can" in doctors.look_at_cache()[1]

    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctors.tempfile, "TemporaryDirectory", refuse)
    assert doctors.look_at_permissions()[0] == "wrong"


def test_help_has_every_command_once_under_what_it_is_for(capsys):
    assert run_app(["--help"]) == 0
    shown = re.findall(r"^  ([a-z-]+)  ", capsys.readouterr().out, re.MULTILINE)
    assert sorted(shown) == sorted(set(shown))
    assert {*typer.main.get_command(app).commands} <= {*shown}
    assert shown.index("run") < shown.index("data") < shown.index("deploy") < shown.index("doctor")


def test_help_shows_whole_sentences(capsys):
    for group in ([], ["study"], ["data"], ["deploy"], ["ledger"]):
        assert run_app([*group, "--help"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "..." not in shown.replace("[ARGS]...", "")


def test_clean_lists_first_and_removes_only_what_is_old(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("POLYCLINIC_CACHE", str(tmp_path))
    for shelf, name, days in (("parts", "old", 40), ("parts", "new", 1), ("generators", "g.safetensors", 40)):
        file = tmp_path / shelf / name / "a.npy" if shelf == "parts" else tmp_path / shelf / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * 1000)
        os.utime(file, (time.time() - days * 86400,) * 2)
    assert [entry.path.name for entry in entries(older_than=30)] == ["g.safetensors", "old"] or len(entries(30)) == 2
    assert run_app(["data", "clean"]) == 0
    assert "add --yes to remove 2.0 kB" in capsys.readouterr().out
    assert len(entries()) == 3
    assert run_app(["data", "clean", "--yes"]) == 0
    assert "removed 2.0 kB" in capsys.readouterr().out
    assert [entry.path.name for entry in entries()] == ["new"]
    assert run_app(["data", "clean", "--yes"]) == 0
    assert "--older-than 0 takes all" in capsys.readouterr().out


def test_ctrl_c_is_told_in_every_command(capsys, monkeypatch):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctors, "examine", interrupted)
    assert run_app(["doctor"]) == 1
    assert capsys.readouterr().err == "interrupted; what was finished is kept\n"


@pytest.mark.parametrize("code", [0, 3])
def test_a_participant_starts_without_the_debug_lines_of_nvflare(tmp_path, capfd, monkeypatch, code):
    program = f"import sys; print('DEBUG - cell created'); sys.exit({code})"

    def start(output, *, alone):
        assert not alone  # Ctrl-C of this terminal reaches it
        return subprocess.Popen([sys.executable, "-c", program], stdout=output)

    kit = SimpleNamespace(name="north", kit=tmp_path, start=start)
    monkeypatch.setattr("polyclinic.deployment.processes.Participant.of", lambda _: kit)
    monkeypatch.setattr(
        "polyclinic.deployment.confirmation.confirmation_of", lambda _: SimpleNamespace(rehearsal=False)
    )
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert run_app(["deploy", "start", str(tmp_path)]) == code
    said = capfd.readouterr()
    assert said.out == f"north runs here; Ctrl-C ends it; NVFlare's own words: {tmp_path / 'console.log'}\n"
    assert ("ended with exit code 3" in said.err) == (code == 3)
    assert (tmp_path / "console.log").read_text() == "DEBUG - cell created\n"
    assert run_app(["deploy", "start", str(tmp_path), "--verbose"]) == code
    assert "DEBUG" in capfd.readouterr().out


QUICK = """
import sys
from polyclinic.cli import run_app
for command in {commands!r}:
    assert run_app(command) == 0, command
    assert "torch" not in sys.modules, command
"""


def test_quick_commands_do_not_import_torch(tmp_path, undisturbed, tiny):
    """In one process for all of them: importing torch takes seconds."""
    scans = tmp_path / "scans"
    for label in ("a", "b"):
        (scans / label).mkdir(parents=True)
        for number in range(3):
            (scans / label / f"{number}.png").write_bytes(PNG)
    run = undisturbed(tiny("fedavg", rounds=1)).folder
    study = str(tmp_path / "study.toml")
    commands = [
        ["--help"],
        ["--version"],
        *([name, "--help"] for name in ("run", "compare", "study", "data", "deploy", "site", "audit")),
        ["study", "new", study, "--for", str(scans)],
        ["study", "new", "--list-presets"],
        ["study", "new", str(tmp_path / "paper.toml"), "--preset", "qu-retina"],
        ["ledger", str(run)],
        ["ledger", "verify", str(run)],
        ["doctor", "--quick"],
        *(["list", kind] for kind in ("sources", "partitions", "kinds")),
    ]
    done = subprocess.run(
        [sys.executable, "-c", QUICK.format(commands=commands)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


#: one grey pixel
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c63680000008200817f69d5390000"
    "000049454e44ae426082"
)
