"""Every dependency earns its place: it is imported somewhere in the package, or a user's study can need it."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from polyclinic.metrics.networks import efficientnet

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
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
