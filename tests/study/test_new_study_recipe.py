"""A new study begins with the settings of training that were measured to do best."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from polyclinic.study.template import RECIPE, RECIPE_FOR, template

EXAMPLE = Path(__file__).parents[2] / "examples" / "first_model.toml"


def tables_of(method: str) -> dict:
    return tomllib.loads(template(method=method, source="fundus-phantom", partition="label-skew"))


@pytest.mark.parametrize("method", RECIPE_FOR)
def test_a_new_study_has_the_settings_of_the_example(method):
    example, found = tomllib.loads(EXAMPLE.read_text()), tables_of(method)
    for table, settings in RECIPE.items():
        for name, value in settings.items():
            assert found[table][name] == example[table][name] == value


def test_other_methods_keep_their_defaults():
    found = tables_of("scaffold")
    assert (found["optimizer"]["name"], found["optimizer"]["lr"]) == ("sgd", 0.01)
    assert "docs/methods.md" not in template(method="scaffold", source="fundus-phantom", partition="label-skew")
