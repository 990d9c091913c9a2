"""A first hour at the command line, and the tables that it prints."""

import json
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import typer.main
from rich.console import Console

from polyclinic.cli import doctor as doctors
from polyclinic.cli import run_app, tables
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


def test_help_has_every_command_once_in_whole_sentences(capsys):
    assert run_app(["--help"]) == 0
    shown = re.findall(r"^  ([a-z-]+)  ", capsys.readouterr().out, re.MULTILINE)
    assert sorted(shown) == sorted(set(shown))
    assert {*typer.main.get_command(app).commands} <= {*shown}
    assert shown.index("run") < shown.index("data") < shown.index("deploy") < shown.index("doctor")
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


WHY = (
    "this budget does not find a planted leak either (an update of one step on held-out images, without noise: half of "
    "each step is by one, half by 7); try a larger one"
)
QUESTIONS = ("images", "membership", "site", "origin")


def question(verdict: str) -> dict:
    return {"verdict": verdict, "attacks": ["loss-threshold", "rmia"], "seconds": 3.0, "why": WHY}


REPORT = {
    "method": "fedavg-replay",
    "budget": "quick",
    "verdicts": {
        "synthetic-images": {
            "left": 4, "attacked": 1, "questions": {name: question("not tested") for name in ("copies", "membership")},
        },
        "weights": {"left": 40, "attacked": 2, "questions": {name: question("withstood") for name in QUESTIONS}},
        "labels": {"left": 2, "verdict": "leaks", "words": "labels of single images left the site as they are"},
    },
    "threat_table": [["follows the rules", "yes, and is curious"], ["holds", "gradients, weights, latents " * 6]],
}  # fmt: skip
COORDINATOR = {
    "verdict": "withstood",
    "why": "crafted-sum, imprint get images back without the incoming check, and are stopped with it",
    "rows": [
        {"attack": "honest weights", "checked": True, "stopped": False, "identified": 0, "of": 64, "by_chance": 0,
         "psnr": None},
    ],
}  # fmt: skip


def printed(table, width: int = 80) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text().splitlines()


def test_the_table_fits_a_screen_of_80_columns_without_broken_words():
    lines = printed(tables.verdict_table(REPORT))
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 36
    words = " ".join(lines).split()
    for name in ("synthetic-images", "membership", "origin", "withstood", "tested", "planted"):
        assert name in words
    known = set(re.findall(r"[\w-]+", f"{REPORT} kind attacked question why what the parcels give away"))
    assert set(re.findall(r"[\w-]{3,}", " ".join(lines))) <= known
    assert any("try a larger one" in line for line in printed(tables.verdict_table(REPORT, 240), 240))
    for table in (tables.threat_table(REPORT), tables.coordinator_table(COORDINATOR)):
        assert max(map(len, printed(table))) <= 80


def test_a_wide_table_is_printed_in_parts_and_breaks_no_word():
    columns = ["method", "balanced accuracy", "95 % interval", "p against fedavg"]
    columns += ["average surface distance", "carried"]
    rows = [["cwt-replay", "0.912 ± 0.034", "0.878 to 0.946", "< 0.001", "12.345 ± 1.234", "123.4 MB"]]
    rows += [None, ["a guess"]]
    shown = {}
    for width in (200, 80, 60):
        console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        tables.print_table(columns, rows, console=console, whole=1, title="everything that was measured")
        shown[width] = console.export_text()
        assert max(map(len, shown[width].splitlines())) <= width
        words = set(re.findall(r"[\w.<%±-]+", shown[width]))
        assert words == set(re.findall(r"[\w.<%±-]+", f"{columns} {rows[0]} a guess everything that was measured"))
        assert "0.912 ± 0.034" in shown[width]
    assert shown[200].count("cwt-replay") == 1 < shown[60].count("cwt-replay")


def test_attacks_warnings_and_replays_in_words(capsys):
    of_kind = {"left": 1, "attacked": 1, "released": 1, "questions": {"membership": question("not tested")}}
    assert list(tables.attacks_of("weights", of_kind))[-1] == "weights: the released model was attacked, too"
    assert len(list(tables.attacks_of("weights", {**of_kind, "released": 0}))) == 1
    tables.print_warnings(Console(), ["few images", "few steps"], shown=["few images"])
    assert capsys.readouterr().out.splitlines() == [
        "warning: few steps",
        "1 warning stands above the table, and in result.json",
    ]
    tables.print_warnings(Console(), [], shown=[])
    assert capsys.readouterr().out == ""
    assert tables.replay_sentence({}) == ""
    found = {"psnr": 31.44, "code_usage_top": 0.93, "code_usage_bottom": 1.0, "real_or_replayed_auc": 0.9991}
    assert tables.replay_sentence(found) == (
        "replayed images came back at 31.4 dB; codes in use: 93% (top), 100% (bottom); "
        "a probe tells real from replayed with an AUC of 0.999"
    )
    probed = found | {"which_site_accuracy": 0.264, "which_site_chance": 0.25}
    assert tables.replay_sentence(probed).endswith("and which site made one in 26% of cases (25% by chance)")
