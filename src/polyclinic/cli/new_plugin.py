"""`polyclinic new-plugin DIR` writes a small package with a method, a source and a backbone, and tests that pass."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path

import typer

from polyclinic.errors import BadInput

#: the package that is copied: files with NAME and PACKAGE in their text
TEMPLATE = Path(__file__).with_name("plugin_template")
FILES = {
    "pyproject.toml": "pyproject.toml.txt",
    "README.md": "README.md.txt",
    "study.toml": "study.toml.txt",
    "src/{package}/__init__.py": "init.py.txt",
    "src/{package}/method.py": "method.py.txt",
    "src/{package}/source.py": "source.py.txt",
    "src/{package}/backbone.py": "backbone.py.txt",
    "tests/test_plugin.py": "test_plugin.py.txt",
}


def new_plugin(
    folder: Path = typer.Argument(..., help="The folder to write; its name becomes the name of the package."),
) -> None:
    """Write a package with a method, a source and a backbone of your own, with tests."""
    name = write_plugin(folder)
    typer.echo(
        f"wrote {folder}: the package '{name}' with a method, a source and a backbone\n"
        f"  cd {folder}\n"
        "  pip install -e .            makes its names known\n"
        "  python -m pytest            runs its tests\n"
        f"  polyclinic list methods     shows '{name}' among the methods\n"
        "  polyclinic run study.toml   trains with all three\n"
        "Without installing it: plugins = [...] in study.toml names a Python file; docs/extend.md says more."
    )


def write_plugin(folder: Path) -> str:
    """Write the package; its name."""
    name = folder.resolve().name.lower().replace("_", "-")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise BadInput(f"DIR: '{folder.name}' cannot be the name of a package; use letters, digits and '-'")
    if keyword.iskeyword(name) or importlib.util.find_spec(name.replace("-", "_")):
        raise BadInput(f"DIR: Python has something called '{name}' already; choose another name")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"DIR: {folder} exists already; name a new folder")
    package = name.replace("-", "_")
    for place, template in FILES.items():
        text = (TEMPLATE / template).read_text(encoding="utf-8")
        file = folder / place.format(package=package)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("PACKAGE", package).replace("NAME", name), encoding="utf-8")
    return name
