"""Registries: built-in names, plug-in files and modules, entry points of installed packages; and who may not enter."""

import sys
import warnings
from pathlib import Path

import pytest

from polyclinic import plugins
from polyclinic.cli import run_app
from polyclinic.errors import BadInput, Notice
from polyclinic.methods import METHODS
from polyclinic.registry import BUILT_IN, BY_HAND, GROUPS, REGISTRIES, allow_only, is_restricted, summary_of
from polyclinic.tasks import TASKS

METHOD = '''
from typing import Literal

from polyclinic import FedAvg


class Mine(FedAvg):
    """FedAvg under another name."""

    name: Literal["{name}"] = "{name}"
'''


def write_method(path: Path, name: str = "mine", *, table: bool = True) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(METHOD.format(name=name) + (f'\n\nMETHODS = {{"{name}": Mine}}\n' if table else ""))
    return path


def install(folder: Path, package: str, points: dict[str, str], version: str = "0.1") -> None:
    """What an installer leaves behind: metadata of a distribution with entry points, beside its package."""
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    lines = [f"[{group}]\n{point}\n" for group, point in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))


def install_method(folder: Path, package: str, name: str = "mine", code: str | None = None) -> None:
    """An installed package with a method, or with other code under its name."""
    file = write_method(folder / package / "__init__.py", name, table=False)
    if code is not None:
        file.write_text(code)
    install(folder, package, {"polyclinic.methods": f"{name} = {package}:Mine"})


@pytest.fixture
def site_packages(tmp_path, monkeypatch):
    """A folder on sys.path, as one of an installed package."""
    monkeypatch.syspath_prepend(tmp_path / "packages")
    before = set(sys.modules)
    yield tmp_path / "packages"
    for name in set(sys.modules) - before:
        if name.startswith(("first_package", "second_package")):
            del sys.modules[name]


def test_an_entry_point_is_imported_when_its_name_is_looked_up(site_packages):
    install_method(site_packages, "first_package")
    assert "mine" in METHODS
    assert "mine" in list(METHODS)
    assert "first_package" not in sys.modules
    assert METHODS["mine"]().name == "mine"
    assert METHODS.origin("mine") == "first_package 0.1"
    assert summary_of(METHODS["mine"]) == "FedAvg under another name"
    assert METHODS.origin("fedavg") == BUILT_IN


def test_a_broken_entry_point_is_named_and_disturbs_nobody(site_packages):
    install_method(site_packages, "first_package", "broken", "1 / 0")
    install_method(site_packages, "second_package", "odd", "class Mine: pass")
    assert METHODS["fedavg"]().name == "fedavg"
    with pytest.raises(BadInput, match=r"^first_package 0\.1: its entry point 'broken' .* ZeroDivisionError"):
        METHODS["broken"]
    with pytest.raises(BadInput, match=r"^second_package 0\.1: 'odd' in methods is no subclass of Method"):
        METHODS["odd"]
    with pytest.warns(Notice, match="'broken' in methods is left out"):
        assert "broken" not in METHODS.working()
    assert "fedavg" in METHODS.working()


def test_two_packages_with_one_name_are_refused(site_packages):
    for package in ("first_package", "second_package"):
        install_method(site_packages, package)
    with pytest.raises(BadInput, match=r"_package 0\.1 and .*_package 0\.1 both have an entry point"):
        METHODS["mine"]


def test_a_plugin_file_adds_names_until_it_is_forgotten(tmp_path):
    file = str(write_method(tmp_path / "mine.py"))
    digests = plugins.load([file])
    assert METHODS["mine"]().name == "mine"
    assert METHODS.origin("mine") == f"plug-in {file}"
    assert plugins.load([file]) == digests
    plugins.forget()
    assert "mine" not in METHODS
    with pytest.raises(KeyError):
        METHODS["mine"]


def test_the_code_that_runs_is_the_code_that_was_hashed(tmp_path):
    """Edited within the same second and to the same length: a cached .pyc would still be taken for the file."""
    file = tmp_path / "mine.py"
    for name in ("one", "two"):
        write_method(file, name)
        plugins.load([str(file)])
        assert name in METHODS
    assert not (tmp_path / "__pycache__").exists()


def test_a_plugin_module_may_be_an_entry_point_as_well(site_packages):
    write_method(site_packages / "first_package" / "__init__.py")
    install(site_packages, "first_package", {"polyclinic.methods": "mine = first_package:Mine"})
    plugins.load(["first_package"])
    assert METHODS.origin("mine") == "plug-in first_package"


@pytest.mark.parametrize(("text", "words"), [
    ("x = 1", "has none of the dicts METHODS"),
    ("1 / 0", "cannot be loaded: ZeroDivisionError"),
    ("METHODS = {'mine': 3}", "'mine' in methods is no subclass of Method"),
    ("from polyclinic import FedAvg\nMETHODS = {'cwt': FedAvg}", "'cwt' in methods is taken already"),
    ("def f(:", "cannot be loaded: SyntaxError"),
    ("import sys\nsys.exit(3)", "cannot be loaded: SystemExit: 3"),
    ("SOURCE = {}\nMETHODS = {}", "has a dict SOURCE; did you mean SOURCES?"),
    ("ATTACKS = [1]", "must be a dict"),
    ("METHODS = {3: 4}", "is no text"),
    ("class Mine: pass\nATTACKS = {'mine': Mine}", "'mine' in attacks is no subclass of Attack; derive it"),
    ("from polyclinic import FedAvg\nMETHODS = {'other': FedAvg}", "'other' in methods calls itself 'fedavg'"),
    ("from polyclinic import Source\nclass S(Source): pass\nSOURCES = {'s': S}", "'s' in sources lacks load"),
])  # fmt: skip
def test_mistakes_in_a_plugin_are_one_sentence(tmp_path, text, words):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(BadInput) as error:
        plugins.load([str(file)])
    assert words in str(error.value)
    assert "mine.py" in str(error.value)
    assert "mine" not in METHODS


def test_two_plugins_with_one_name_are_refused(tmp_path):
    first, second = (str(write_method(tmp_path / name)) for name in ("first.py", "second.py"))
    with pytest.raises(BadInput, match=r"second\.py: 'mine' in methods is taken already, by plug-in .*first\.py"):
        plugins.load([first, second])


def test_a_plugin_and_an_installed_package_with_one_name_are_refused(tmp_path, site_packages):
    install_method(site_packages, "first_package")
    with pytest.raises(BadInput, match=r"'mine' in methods is taken already, by first_package 0\.1"):
        plugins.load([str(write_method(tmp_path / "mine.py"))])


def test_by_hand_a_name_is_found_in_this_process_only(monkeypatch):
    monkeypatch.setitem(METHODS, "by-hand", METHODS["fedavg"])
    assert METHODS.origin("by-hand") == BY_HAND

    with pytest.raises(BadInput, match="'fedavg' in methods is taken already, by polyclinic"):
        METHODS["fedavg"] = METHODS["cwt"]


def test_a_site_sees_only_the_packages_that_it_lists(site_packages):
    for package, name in (("first_package", "one"), ("second_package", "two")):
        install_method(site_packages, package, name)
    allow_only(["first_package"])
    assert "one" in METHODS
    assert "two" not in METHODS
    assert "fedavg" in METHODS


def test_every_registry_has_sentences():
    import polyclinic.audits
    import polyclinic.models.encoders  # noqa: F401

    assert set(REGISTRIES) == set(GROUPS.values())
    for registry in REGISTRIES.values():
        assert all(summary_of(entry) for entry in registry.builtin.values()), registry.group
    assert summary_of(TASKS["regression"])


def test_an_entry_point_that_a_built_in_name_hides_is_named_once(site_packages, capsys):
    install_method(site_packages, "first_package", "fedavg")
    words = r"^first_package 0\.1: its entry point 'fedavg' in methods is ignored, as polyclinic has one of that name"
    with pytest.warns(Notice, match=words):
        assert METHODS["fedavg"].__module__ == "polyclinic.methods.fedavg"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        METHODS["fedavg"]
    plugins.forget()
    assert run_app(["list", "methods"]) == 0
    [said] = [line for line in capsys.readouterr().err.splitlines() if "is ignored" in line]
    assert said.endswith("as polyclinic has one of that name; give it another name")
    assert "first_package" not in sys.modules


@pytest.mark.parametrize("listed", ["First_Package", "first-package", "first.package", "FIRST__package"])
def test_a_distribution_is_listed_under_any_spelling_of_its_name(site_packages, listed):
    write_method(site_packages / "first_package_code" / "__init__.py", "one", table=False)
    install(site_packages, "First.Package", {"polyclinic.methods": "one = first_package_code:Mine"})
    allow_only(["second-package"])
    assert "one" not in METHODS
    allow_only([listed])
    assert "one" in METHODS


def test_a_sites_restriction_ends_with_its_scope(tmp_path):
    theirs, ours = (str(write_method(tmp_path / f"{name}.py", name)) for name in ("theirs", "ours"))
    plugins.load([theirs])
    before = METHODS["theirs"]
    with plugins.only_of_site([ours], tmp_path / "site.toml"):
        assert is_restricted()
        assert "ours" in METHODS
        assert "theirs" not in METHODS
        assert plugins.load_from_study([theirs]) == {}
    assert not is_restricted()
    assert METHODS["theirs"] is before
    assert "ours" not in METHODS
    gone = plugins.only_of_site(["gone.py"], tmp_path / "site.toml")
    with pytest.raises(BadInput, match=r"site\.toml: plugins: .*gone\.py cannot be read"), gone:
        pass
    assert not is_restricted()
    assert "theirs" in METHODS
