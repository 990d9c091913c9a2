"""Templates of all pages (HTML) and cards (Markdown), and the one way to fill them in.

What a template prints is escaped by itself, for HTML or for Markdown; `Markup` says that a text is markup already.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from polyclinic.palette import stylesheet

#: characters that mean something in Markdown or HTML
SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~$&@:])")


def render(name: str, **values: Any) -> str:
    """The text of a template with these values."""
    return _environment(Path(name).suffix).get_template(name).render(**values)


@cache
def _environment(suffix: str) -> Environment:
    made = Environment(
        loader=PackageLoader("polyclinic"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_markdown if suffix == ".md" else _html,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals["colours"] = lambda: Markup(stylesheet())
    made.filters["number"] = lambda value: f"{value:.4g}" if isinstance(value, int | float) else "-"
    made.filters["listed"] = lambda found: found if isinstance(found, str) else "; ".join(found or ()) or "nothing"
    return made


def _html(value: Any) -> Any:
    """Without characters that hide others or turn them around; Jinja2 escapes the rest."""
    return visible(value, kept="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value


def _markdown(value: Any) -> Markup:
    return value if isinstance(value, Markup) else Markup(plain(value))


def visible(text: str, kept: str = "") -> str:
    """A text without characters that hide others or turn them around."""
    return "".join(c if c.isprintable() or c in kept else "\N{REPLACEMENT CHARACTER}" for c in text)


def plain(text: object) -> str:
    """A text that somebody chose, as plain words in Markdown: one line, no markup, no control characters."""
    one_line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return SPECIAL.sub(r"\\\1", one_line)
