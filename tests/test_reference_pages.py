"""The reference of the documentation is made from the code: nothing is missing in it, and nothing is empty."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

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
