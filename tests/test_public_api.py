"""What `polyclinic` exports is what docs, examples of plug-ins and notebooks import, and it is typed."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import polyclinic

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEMPLATES = sorted((ROOT / "src" / "polyclinic" / "cli" / "plugin_template").glob("*.py.txt"))
PACKAGES = ("attacks", "generators", "metrics", "models")


def imports(code: str) -> list[str]:
    """Modules of ours that code imports."""
    found: list[str] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name for name in found if name.split(".")[0] == "polyclinic"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_docs_import_from_polyclinic_alone(page):
    for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        assert set(imports(code)) <= {"polyclinic"}, code


@pytest.mark.parametrize("file", [*TEMPLATES, ROOT / "tests" / "plugin_everything.py"], ids=lambda file: file.name)
def test_plugins_import_from_polyclinic_alone(file):
    assert set(imports(file.read_text(encoding="utf-8"))) <= {"polyclinic"}


def test_every_public_name_is_there_and_known_to_type_checkers():
    tree = ast.parse((ROOT / "src" / "polyclinic" / "__init__.py").read_text(encoding="utf-8"))
    typed = {alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    for name in polyclinic.__all__:
        assert getattr(polyclinic, name) is not None
        assert name in typed or name == "__version__", name
    for package in PACKAGES:
        module = getattr(polyclinic, package)
        assert all(getattr(module, name) is not None for name in module.__all__)
    for function in (polyclinic.run, polyclinic.audit, polyclinic.compare, polyclinic.tune, polyclinic.predict):
        assert callable(function)
    with pytest.raises(AttributeError, match="no attribute 'Runn'"):
        polyclinic.Runn  # noqa: B018


def test_importing_polyclinic_is_quick():
    """Nothing heavy comes with it: commands that need no torch do not wait for it."""
    code = "import sys, polyclinic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_types_are_shipped():
    assert (ROOT / "src" / "polyclinic" / "py.typed").is_file()
