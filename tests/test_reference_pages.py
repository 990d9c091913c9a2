"""The public API, its schemas and its reference pages."""

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from json_schemas import NAMES, SCHEMAS, assert_valid, errors, validator

import polyclinic
from polyclinic.methods import METHODS
from polyclinic.study.study import PLAIN, VARIANTS

BUILDING = Path(__file__).parents[1] / "docs" / "building"


@pytest.fixture(scope="module")
def building():
    """Imports a module of docs/building by its name."""
    sys.path.insert(0, str(BUILDING))
    yield importlib.import_module
    sys.path.remove(str(BUILDING))


def test_the_page_of_a_study_has_every_table_and_setting(building):
    page = building("reference_settings").study_page()
    for name, kind in PLAIN.items():
        section = page.split(f"## `[{name}]`")[1].split("\n## ")[0]
        assert [one for one in kind.model_fields if f"| `{one}` |" not in section] == [], name


@pytest.mark.parametrize("name", list(VARIANTS))
def test_a_page_of_variants_has_every_variant_and_setting(building, name):
    page = building("reference_settings").variants_page(name)
    registry, key = VARIANTS[name]
    assert set(registry.builtin) <= set(re.findall(r"^## ([\w-]+)$", page, re.MULTILINE))
    wanted = {field for one in registry.builtin for field in registry[one].model_fields} - {key}
    assert wanted <= set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))


@pytest.mark.parametrize("name", list(METHODS.builtin))
def test_what_leaves_names_every_kind_of_every_operation(building, name):
    page = building("method_parts").what_leaves(name)
    for attribute in dir(METHODS[name]):
        declared = getattr(getattr(METHODS[name], attribute, None), "operation", None)
        for kind in getattr(declared, "releases", ()):
            assert re.search(rf"^\| `{attribute}` \|.*`{kind}`", page, re.MULTILINE), (attribute, kind)


def test_the_page_of_commands_has_every_command_and_option(building):
    commands = building("reference_commands")
    page = commands.commands_page()
    for path, command in commands._commands("polyclinic", commands._whole()):
        assert f"# {path}\n" in page
        for option in (one for one in command.params if one.param_type_name == "option" and not one.hidden):
            assert f"`{option.opts[0]}`" in page


def test_the_page_of_the_api_has_every_public_name(building):
    page = building("reference_api").api_page()
    packages = building("reference_api").PACKAGES
    names = [name for name in polyclinic.__all__ if name not in packages and name != "__version__"]
    assert [name for name in names if f"### {name}\n" not in page] == []
    assert [name for name in packages if f"## polyclinic.{name}\n" not in page] == []


def test_the_page_of_formats_has_every_schema_and_field(building):
    formats = building("reference_formats")
    page = formats.formats_page()
    for name, text in formats.schemas().items():
        assert f"(schemas/{name}.schema.json)" in page
        assert [one for one in json.loads(text)["properties"] if f"| `{one}` |" not in page] == []


def test_links_lead_to_pages_of_the_site(building):
    pytest.importorskip("mkdocs")
    mended = building("hooks").with_site_links
    assert mended("[a](../SECURITY.md#b)", "deploy.md") == "[a](project/security.md#b)"
    assert mended("[a](../../README.md)", "methods/fedavg.md") == "[a](../project/readme.md)"
    assert mended("[a](docs/deploy.md)", "project/readme.md") == "[a](../deploy.md)"
    assert mended("[hands](../examples/hands.toml)", "choose.md") == "[hands](examples/hands.toml)"
    assert mended("[a](../src/polyclinic/files.py)", "ledger.md") == "a (`src/polyclinic/files.py`)"
    assert mended("[a](study.md) [b](#c) [d](https://e.org/f.md)", "tune.md") == (
        "[a](study.md) [b](#c) [d](https://e.org/f.md)"
    )


FINISHED = Path(__file__).parent / "data" / "run_format_1" / "finished"


def example(name: str) -> dict[str, Any]:
    """A right value of a schema."""
    if name == "result":
        return json.loads((FINISHED / "result.json").read_text())
    if name == "ledger_line":
        return json.loads((FINISHED / "ledger" / "site-1.jsonl").read_text().splitlines()[0])
    return json.loads((FINISHED / "history.jsonl").read_text().splitlines()[0])


def test_every_schema_is_one_and_is_listed_here():
    assert {path.name for path in SCHEMAS.iterdir()} == {f"{name}.schema.json" for name in NAMES}
    for name in NAMES:
        validator(name).check_schema(validator(name).schema)


@pytest.mark.parametrize(("name", "path", "value"), [
    ("result", "seed", "0"),
    ("result", "weights_sha256", "abc"),
    ("result", "metrics.test.accuracy", "high"),
    ("result", "metrics.per_site.site-1", [1]),
    ("result", "communication.by_kind.weights", -1),
    ("result", "privacy", {"epsilon": 3.0}),
    ("ledger_line", "bytes", 1.5),
    ("ledger_line", "digest", "A" * 64),
    ("ledger_line", "privacy", {}),
    ("ledger_line", "note", "a key that nobody knows"),
    ("history_line", "round", 0),
    ("history_line", "validation.pooled.loss", None),
])  # fmt: skip
def test_a_wrong_value_is_found(name, path, value):
    wrong = example(name)
    assert errors(name, wrong) == []
    *parents, last = path.split(".")
    table = wrong
    for parent in parents:
        table = table[parent]
    table[last] = value
    assert errors(name, wrong)


def test_privacy_is_described_too(tiny, undisturbed):
    study = tiny("fedavg", {"privacy.noise_multiplier": 1.0, "model.norm": "group"}, rounds=1)
    result = undisturbed(study)  # which holds the folder against the schemas
    assert result["privacy"]["epsilon"] > 0
    lines = (result.folder / "ledger" / "site-1.jsonl").read_text().splitlines()
    assert any(json.loads(line)["privacy"] for line in lines)


def test_the_kept_run_folder_follows_them():
    assert_valid(FINISHED)


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
