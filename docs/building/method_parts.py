"""The parts of a method's page that come from its code: what leaves a site, and the settings."""

from __future__ import annotations

import inspect
import re

from reference_settings import settings_table
from schema_words import cell, table

from polyclinic.federation.operation import Operation
from polyclinic.methods import METHODS

#: what a page says in the place of a part until the site is built
PART = re.compile(r"\*`make docs` writes this part from the code\.\* <!-- (what leaves|settings): ([\w-]+) -->")


def filled(markdown: str) -> str:
    """A page with the generated parts of the methods that it describes."""
    writers = {"what leaves": what_leaves, "settings": settings_of}
    return PART.sub(lambda part: writers[part[1]](part[2]), markdown)


def settings_of(name: str) -> str:
    return settings_table(METHODS[name], without=("name",))


def what_leaves(name: str) -> str:
    """A row for each operation of the method that releases something."""
    rows = []
    for operation, declared, does in operations_of(name):
        kinds = ", ".join(f"`{kind}`" for kind in declared.releases)
        rows.append([f"`{operation}`", kinds, _receiver(declared), _when(declared), cell(does)])
    return table(("operation", "kinds of parcel", "to", "when", "what it does"), rows)


def operations_of(name: str) -> list[tuple[str, Operation, str]]:
    """Name, declaration and first sentence of every operation that releases parcels; scores last."""
    found = []
    for operation, function in inspect.getmembers(METHODS[name], inspect.isfunction):
        declared = getattr(function, "operation", None)
        if declared and declared.releases:
            found.append((operation, declared, (inspect.getdoc(function) or "").split("\n\n")[0]))
    return sorted(found, key=lambda one: one[0] == "evaluate")


def _receiver(declared: Operation) -> str:
    return "another site, sealed" if declared.partner == "sites" else "coordinator"


def _when(declared: Operation) -> str:
    if declared.partner == "simulator":
        return "in simulations only"
    return "several times a round" if declared.repeats else "at most once a round"
