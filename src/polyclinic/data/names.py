"""Names of sites: they become names of folders, so they must not be able to leave their place."""

from __future__ import annotations

import re
from collections.abc import Iterable

from polyclinic.errors import BadInput

SAFE = re.compile(r"\w(?:[\w .+()-]{0,98}[\w+)-])?")


def refuse_unsafe_name(name: str) -> None:
    """Letters, digits, _ and, inside the name, also space . + - ( ); nothing a path could be made of."""
    if not SAFE.fullmatch(name):
        raise BadInput(
            f"sites: '{name}' cannot be the name of a site; "
            "use at most 100 letters, digits, '_', '-', '.' or spaces, starting with a letter or digit"
        )


def check_site_names(names: Iterable[str]) -> None:
    """Refuses unsafe names, and names that a file system without upper case would take for one."""
    seen: dict[str, str] = {}
    for name in names:
        refuse_unsafe_name(name)
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            raise BadInput(f"sites: '{other}' and '{name}' differ by upper case only; rename one of them")


def safe_name(text: str) -> str:
    """The nearest name that a site may have: "other/unknown" becomes "other-unknown"."""
    cleaned = re.sub(r"[^\w .+()-]+", "-", text.strip())[:100].strip(" .-+()")
    return cleaned or "unnamed"
