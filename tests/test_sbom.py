"""The bill of materials names every package that the project needs, as CycloneDX."""

import runpy
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SBOM = runpy.run_path(str(ROOT / "benchmarks" / "sbom.py"))


def test_every_dependency_of_the_project_is_in_the_bill():
    found = SBOM["bill"](frozenset())
    names = {one["name"] for one in found["components"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(text) for text in project["dependencies"]]
    here = {SBOM["normal"](one.name) for one in needed if one.marker is None or one.marker.evaluate()}
    assert here <= names
    assert found["bomFormat"] == "CycloneDX"
    torch = next(one for one in found["components"] if one["name"] == "torch")
    assert torch["purl"].startswith("pkg:pypi/torch@2.")


def test_each_edge_leads_to_a_component():
    found = SBOM["bill"](frozenset())
    known = {one["name"] for one in found["components"]} | {"polyclinic"}
    assert {name for edge in found["dependencies"] for name in (edge["ref"], *edge["dependsOn"])} <= known
    assert len(known) > 15
