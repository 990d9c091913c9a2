"""The software bill of materials: every package of this environment that Polyclinic needs, as CycloneDX 1.5 JSON.

    python benchmarks/sbom.py [--extras dev,nvflare] [--json FILE]

Names, versions, licences, hashes of the installed files' record, and who needs whom, from the metadata of what is
installed; nothing is asked of a network.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

NAME = "polyclinic"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(name: str, extras: frozenset[str] = frozenset()) -> list[tuple[str, frozenset[str]]]:
    """The packages that an installed one needs here, and their extras."""
    found = []
    for text in metadata.requires(name) or []:
        requirement = Requirement(text)
        contexts = [{"extra": extra} for extra in (extras or {""})]
        if requirement.marker is None or any(requirement.marker.evaluate(context) for context in contexts):
            found.append((normal(requirement.name), frozenset(requirement.extras)))
    return found


def walk(name: str, extras: frozenset[str]) -> dict[str, list[str]]:
    """Every package behind one, with those that it needs itself; what is not installed is left out."""
    edges: dict[str, list[str]] = {}
    waiting = [(name, extras)]
    while waiting:
        one, its_extras = waiting.pop()
        try:
            needs = needed(one, its_extras)
        except metadata.PackageNotFoundError:
            continue
        before = edges.setdefault(one, [])
        fresh = [entry for entry in needs if entry[0] not in before]
        before += [entry[0] for entry in fresh]
        waiting += fresh
    return {one: sorted(set(needs) & set(edges)) for one, needs in sorted(edges.items())}


def component(name: str) -> dict[str, Any]:
    found = metadata.distribution(name)
    about = {"type": "library", "name": name, "version": found.version, "bom-ref": name}
    about["purl"] = f"pkg:pypi/{name}@{found.version}"
    licence = found.metadata.get("License-Expression") or found.metadata.get("License") or ""
    if licence and len(licence) < 60:
        about["licenses"] = [{"license": {"name": licence}}]
    if record := found.read_text("RECORD"):  # the installed files with their hashes
        about["hashes"] = [{"alg": "SHA-256", "content": hashlib.sha256(record.encode()).hexdigest()}]
    return about


def bill(extras: frozenset[str]) -> dict[str, Any]:
    edges = walk(NAME, extras)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {**component(NAME), "type": "application"}},
        "components": [component(name) for name in edges if name != NAME],
        "dependencies": [{"ref": name, "dependsOn": needs} for name, needs in edges.items()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the same: it takes a second")
    parser.add_argument("--extras", default="", help="extras of the project, separated by commas")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    found = bill(frozenset(filter(None, chosen.extras.split(","))))
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({"components": len(found["components"]), "dependencies": len(found["dependencies"])}))


if __name__ == "__main__":
    main()
