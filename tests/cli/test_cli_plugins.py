"""Commands of other packages (entry points `polyclinic.commands`), and `polyclinic list` with what packages add."""

import json
import sys
from pathlib import Path

import pytest
import typer
from test_registry import install as install_package

from polyclinic.cli import app as cli_app
from polyclinic.cli import run_app
from polyclinic.cli.plugins import KINDS
from polyclinic.errors import BadInput

TOLD = """
import typer


def greet(name: str = typer.Argument(...), loud: bool = typer.Option(False, "--loud")) -> None:
    '''Greet somebody.'''
    typer.echo(f"hello {name}{'!' if loud else ''}")


app = typer.Typer()
app.command("one")(greet)
app.command("two")(greet)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a package with a command on sys.path, as an installer would."""
    monkeypatch.syspath_prepend(tmp_path)

    def add(package: str, point: str, text: str = TOLD) -> None:
        info = Path(tmp_path) / f"{package}-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
        (info / "entry_points.txt").write_text(f"[polyclinic.commands]\n{point}\n")
        (tmp_path / f"{package}.py").write_text(text)

    yield add
    for name in ("greeter", "other"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("words", [["greet", "Ada", "--loud"], ["greets", "one", "Ada", "--loud"]])
def test_a_function_and_a_typer_app_run(install, capsys, words):
    install("greeter", "greet = greeter:greet\ngreets = greeter:app")
    assert run_app(words) == 0
    assert capsys.readouterr().out == "hello Ada!\n"


def test_help_of_the_command_and_its_mistakes_are_as_those_of_our_own(install, capsys):
    install("greeter", "greet = greeter:greet")
    assert run_app(["greet", "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Usage: polyclinic greet [OPTIONS] ")
    assert "completion" not in said
    assert run_app(["greet"]) == 2
    assert "`polyclinic greet --help`" in capsys.readouterr().err


def test_a_command_of_ours_is_not_replaced(install, capsys):
    install("greeter", "list = greeter:greet")
    assert run_app(["--help"]) == 0
    assert "greeter 0.1: its command 'list' is ignored" in capsys.readouterr().err
    assert run_app(["list", "partitions"]) == 0
    assert "iid" in capsys.readouterr().out
    assert "greeter" not in sys.modules


def test_two_packages_with_one_command_are_named(install, capsys):
    install("greeter", "greet = greeter:greet")
    install("other", "greet = other:greet")
    assert run_app(["greet", "Ada"]) == 2
    said = capsys.readouterr().err
    assert "greeter 0.1" in said
    assert "other 0.1" in said


@pytest.mark.parametrize("text", ["import not_there", "greet = 3", "raise SystemExit(3)"])
def test_a_package_that_cannot_be_used_is_named_and_disturbs_no_other_command(install, capsys, text):
    install("greeter", "greet = greeter:greet", text)
    assert run_app(["greet"]) == 2
    assert "greeter 0.1: its command 'greet' (greeter:greet) cannot be used" in capsys.readouterr().err
    assert run_app(["list", "partitions"]) == 0


def test_a_command_of_the_lab_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("polyclinic.cli.groups.points_of", lambda group: {})
    group = typer.main.get_command(cli_app)
    with pytest.raises(
        BadInput, match=r"^reproduce: `pip install --editable lab` in the source tree of polyclinic adds"
    ):
        group.main(["reproduce", "--list"], prog_name="polyclinic", standalone_mode=False)


EVERYTHING = Path(__file__).parents[1] / "plugin_everything.py"


def listed(capsys, *arguments: str) -> dict[str, dict[str, str]]:
    assert run_app(["list", *arguments, "--json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_listed_with_a_sentence_and_an_origin(capsys, kind):
    rows = listed(capsys, kind)
    assert rows
    assert all(row["summary"] and row["from"] == "polyclinic" for row in rows.values())
    assert run_app(["list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(rows)
    assert all(line.endswith("[polyclinic]") for line in lines)


def test_plugins_of_a_study_are_listed(capsys, tmp_path):
    study = tmp_path / "study.toml"
    study.write_text(
        f"plugins = ['{EVERYTHING}']\n[data]\nsource = 'squares'\n[sites]\npartition = 'in-turn'\ncount = 2\n"
        "[method]\nname = 'fed-prototypes'\n[policy]\nkinds = ['weights', 'metrics', 'prototypes']\n"
    )
    for kind in KINDS:
        added = [row for row in listed(capsys, kind, "--study", str(study)).values() if row["from"] != "polyclinic"]
        assert [row["from"] for row in added] == [f"plug-in {EVERYTHING}"]
        assert added[0]["summary"]


def test_a_broken_package_is_listed_with_the_reason(capsys, tmp_path, monkeypatch):
    install_package(tmp_path / "packages", "broken", {"polyclinic.methods": "broken = no_such_module:X"})
    monkeypatch.syspath_prepend(tmp_path / "packages")
    row = listed(capsys, "methods")["broken"]
    assert row["from"] == "broken 0.1"
    assert "cannot be imported: ModuleNotFoundError" in row["summary"]
