"""Defaults and bounds of settings are those recorded: another default is another result for whoever does not set it.

    python tests/test_recorded_settings.py    records them again, such as after a new setting

A setting that is not recorded yet is not compared.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from polyclinic import attacks
from polyclinic.attacks.decoders import FeatureDecoder, LearnedDecoder
from polyclinic.attacks.membership import DiscriminatorScore, ReferenceGenerators
from polyclinic.federation.policy import Incoming
from polyclinic.study.study import PLAIN, VARIANTS

RECORDED = Path(__file__).with_name("recorded_settings.json")
#: of a setting, what is told to people and to machines that fill in forms
WORDS = ("description", "title")
ATTACKS = (
    *(attacks.CraftedSum, attacks.Fishing, attacks.Imprint, attacks.OverflowFilter, attacks.TrapWeights),
    *(attacks.CopySearch, attacks.GradientInversion, attacks.PairedDecoder, attacks.SurrogateDecoder),
    *(attacks.LatentInversion, attacks.LossThreshold, attacks.NearestSynthetic, attacks.ShadowModels),
    *(attacks.Projection, LearnedDecoder, FeatureDecoder, ReferenceGenerators, DiscriminatorScore),
)
KINDS = {
    **PLAIN,
    "incoming": Incoming,
    **{f"attack {one.__name__}": one for one in ATTACKS},
    **{f"{table} {name}": registry[name] for table, (registry, _) in VARIANTS.items() for name in registry.builtin},
}


def settings_of(kind: Any) -> dict[str, Any]:
    """What each setting may be, and what it is if it is not given."""
    schema = kind.model_json_schema(mode="validation")
    return {name: _without_words(field) for name, field in schema["properties"].items()}


def _without_words(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: _without_words(value) for key, value in part.items() if key not in WORDS}
    return [_without_words(value) for value in part] if isinstance(part, list) else part


@pytest.fixture(scope="module")
def recorded():
    return json.loads(RECORDED.read_text(encoding="utf-8"))


@pytest.mark.parametrize("table", KINDS)
def test_defaults_and_bounds_are_those_recorded(recorded, table):
    found, known = settings_of(KINDS[table]), recorded.get(table, {})
    differ = {name: (found.get(name), known[name]) for name in known if found.get(name) != known[name]}
    assert not differ, f"`python {Path(__file__).name}` in tests/ records them again; CHANGELOG.md says why"


if __name__ == "__main__":
    rows = [
        f'"{table}": {{\n'
        + ",\n".join(f' "{name}": {json.dumps(one)}' for name, one in settings_of(kind).items())
        + "}"
        for table, kind in KINDS.items()
    ]
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
