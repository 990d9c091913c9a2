"""What is published: the wheel, the lock, and dependencies that are imported and explained."""

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from functools import cache
from pathlib import Path

import pytest

import polyclinic
from polyclinic.metrics.networks import efficientnet

ROOT = Path(__file__).parents[1]
OF_ENGINEERS = ("docs", "release", "browser", "dev")  #: extras that no user installs
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_all_files_have_the_same_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert PROJECT["version"] == polyclinic.__version__
    assert f"\nversion: {polyclinic.__version__}\n" in citation
    assert f"## {polyclinic.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def listed_packages(part: str) -> dict[str, str]:
    """Name and version of each package in a part of the notices."""
    rows = re.findall(r"^\| (\S+) \| (\S+) \|", part, re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in rows if name != "package"}


#: what Polyclinic may add to torch, with what pip compiles
LARGEST = 350e6
ADDED_BYTES = """
import sys
sys.path.insert(0, sys.argv[1])
from third_party_notices import closure
brought = {file.locate() for one in closure("polyclinic") for file in one.files or []}
brought -= {file.locate() for one in closure("torch") for file in one.files or []}
print(sum(file.stat().st_size for file in brought if file.is_file()))
"""


def test_licences_are_there():
    assert all((ROOT / file).is_file() for file in PROJECT["license-files"])
    notices = (ROOT / "THIRD_PARTY_NOTICES.md").read_text(encoding="utf-8")
    core, *extras = re.split(r"^## `polyclinic\[", notices, flags=re.MULTILINE)
    parts = {part.split("]")[0]: listed_packages(part) for part in extras}
    users = {name: wanted for name, wanted in PROJECT["optional-dependencies"].items() if name not in OF_ENGINEERS}
    assert parts.keys() == users.keys()
    for wanted, found in [(PROJECT["dependencies"], {}), *((wanted, parts[name]) for name, wanted in users.items())]:
        names = {re.split(r"[<>=!~\[; ]", one)[0].lower().replace("_", "-") for one in wanted}
        assert names <= {*listed_packages(core), *found}
    assert "unknown" not in notices.lower()


def pins() -> dict[str, str]:
    """The versions of the lock."""
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def test_the_lock_has_every_direct_dependency_with_hashes_and_no_address():
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    wanted = [*PROJECT["dependencies"], *(one for extra in PROJECT["optional-dependencies"].values() for one in extra)]
    assert {re.split(r"[<>=!~\[; ]", one)[0].lower().replace("_", "-") for one in wanted} <= set(pins())
    assert all("--hash=sha256:" in entry for entry in text.replace("\\\n", "").splitlines())
    assert "://" not in text
    assert "--index" not in text


def test_the_notices_have_the_versions_of_the_lock():
    versions = pins()
    text = (ROOT / "THIRD_PARTY_NOTICES.md").read_text(encoding="utf-8").replace("+cpu", "")
    notices = listed_packages(text)
    assert {name: version for name, version in notices.items() if versions.get(name, version) != version} == {}


def _run(*command: str | Path, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(one) for one in command], cwd=cwd, env=clean, capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    pytest.importorskip("build", reason="pip install 'polyclinic[release]'")
    folder = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.mark.slow
def test_wheel_and_sdist_hold_what_they_must(built):
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    inside = zipfile.ZipFile(wheel).namelist()
    assert {"polyclinic/py.typed", "polyclinic/schemas/result.schema.json"} <= set(inside)
    assert any(name.endswith("licenses/THIRD_PARTY_NOTICES.md") for name in inside)
    assert not any(name.startswith(("tests/", "docs/")) for name in inside)
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"docs/README.md", "tests/test_publishing.py", "examples/hands.toml", "mkdocs.yml", "Makefile"} <= names
    assert not any(name.startswith((".venv", "runs/", "build/")) for name in names)


@pytest.mark.slow
def test_the_wheel_runs_the_demos_study_in_a_new_environment(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    _run(sys.executable, "-m", "venv", tmp_path / "new", cwd=tmp_path)
    program = tmp_path / "new" / "bin"
    (tmp_path / "pins.txt").write_text("\n".join(f"{name}=={version}" for name, version in pins().items()))
    _run(program / "pip", "install", "--quiet", "--constraint", tmp_path / "pins.txt", wheel, cwd=tmp_path)
    where = _run(program / "python", "-c", "import polyclinic; print(polyclinic.__file__)", cwd=tmp_path)
    assert str(tmp_path / "new") in where
    assert int(_run(program / "python", "-c", ADDED_BYTES, ROOT / "docs" / "building", cwd=tmp_path)) <= LARGEST
    sets = ("--set", "data.samples=200", "--set", "method.rounds=1")
    _run(program / "polyclinic", "run", ROOT / "examples" / "hands.toml", *sets, "--out", "first", cwd=tmp_path)
    result = json.loads((tmp_path / "first" / "result.json").read_text(encoding="utf-8"))
    assert result["task"] == "regression"
    assert result["metrics"]["test"]["mae"] > 0


#: distributions whose package has another name
MODULES = {"pillow": "PIL", "tomli-w": "tomli_w", "mlflow-skinny": "mlflow", "tensorboard": "torch"}
#: extras that are for developers: tools, which the package does not import
TOOLS = {"browser", "dev", "docs", "release"}
#: never imported by us: MONAI needs it, which is tested below; a package without code, whose file is opened by name;
#: torch's exporter of ONNX needs it; MONAI's command needs it; MLflow's database needs them
NOT_IMPORTED = {"einops", efficientnet.PACKAGE, "onnxscript", "fire", "alembic", "sqlalchemy"}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~\[; ]", text)[0] for text in requirements}


@cache
def imported() -> set[str]:
    """The first part of every module that the package imports, anywhere."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("name", sorted(names(PROJECT["dependencies"]) - NOT_IMPORTED))
def test_a_dependency_is_imported(name):
    assert MODULES.get(name, name) in imported()


@pytest.mark.parametrize("extra", sorted(set(PROJECT["optional-dependencies"]) - TOOLS))
def test_an_extra_is_imported(extra):
    wanted = names(PROJECT["optional-dependencies"][extra]) - NOT_IMPORTED
    assert {MODULES.get(name, name) for name in wanted} <= imported()


def test_the_page_about_dependencies_names_each_one():
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    extras = [wanted for extra, wanted in PROJECT["optional-dependencies"].items() if extra != "dev"]
    everything = names(PROJECT["dependencies"]).union(*map(names, extras))
    assert [name for name in sorted(everything) if f"`{name}`" not in page] == []
