"""`polyclinic list KIND`: what can be named in a study, in one sentence each, and where it comes from.
`polyclinic new-plugin DIR` writes a small package with a method, a source and a backbone, and tests that pass."""

import importlib.util
import json
import keyword
import re
from pathlib import Path

import typer

from polyclinic.errors import BadInput
from polyclinic.files import check_place
from polyclinic.json_types import JsonObject
from polyclinic.registry import GROUPS

#: methods, sources, ...
KINDS = [group.removeprefix("polyclinic.") for group in GROUPS.values()]


def list_entries(
    kind: str = typer.Argument(..., help=", ".join(KINDS)),
    study: Path | None = typer.Option(None, help="A study whose plug-ins are to be listed, too.", show_default=False),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON list."),
) -> None:
    """List what a study can name (methods, sources, partitions and others), and where each comes from."""
    from polyclinic.settings import no_such_choice

    if kind not in KINDS:
        raise BadInput(f"KIND: {no_such_choice(kind, KINDS)}")
    if study is not None:
        from polyclinic.study import load_study

        load_study(study)
    rows = rows_of(kind)
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        typer.echo(f"{row['name']:{width}}  {row['summary']} [{row['from']}]")


def rows_of(kind: str) -> list[JsonObject]:
    """Name, sentence and origin of every entry; of one that cannot be imported, why not."""
    from polyclinic.registry import registry_of, summary_of

    registry = registry_of(kind)
    rows = []
    for name in registry:
        try:
            summary = summary_of(registry[name])
        except BadInput as error:
            summary = f"cannot be used: {error}"
        rows.append({"name": name, "summary": summary, "from": registry.origin(name)})
    return rows


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


def new_plugin(folder: Path = typer.Argument(..., help="The folder to write; the package gets its name.")) -> None:
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
    check_place(folder, "DIR:")
    package = name.replace("-", "_")
    for place, template in FILES.items():
        text = (TEMPLATE / template).read_text(encoding="utf-8")
        file = folder / place.format(package=package)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("PACKAGE", package).replace("NAME", name), encoding="utf-8")
    return name
