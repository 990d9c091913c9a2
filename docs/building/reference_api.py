"""The page about the public API, from the names that `polyclinic` exports."""

from __future__ import annotations

import inspect
import re
from typing import Any

import polyclinic
from polyclinic.settings import Settings

HEAD = """# Python API

*This page is made from the code when the documentation is built.*

What is listed here is the public API. A notebook or a plug-in imports it from `polyclinic` and from nowhere else;
other modules may change without notice. [Studies and results](../study.md) has an example that runs.
"""
#: packages whose exports are public as well
PACKAGES = ("attacks", "generators", "metrics", "models")


def api_page() -> str:
    names = [name for name in polyclinic.__all__ if name not in PACKAGES and not name.startswith("__")]
    functions = [name for name in names if inspect.isfunction(getattr(polyclinic, name))]
    classes = [name for name in names if inspect.isclass(getattr(polyclinic, name))]
    others = sorted(set(names) - set(functions) - set(classes))
    parts = [HEAD, "## Functions", *(_entry(name, getattr(polyclinic, name)) for name in functions)]
    parts += ["## Classes", *(_class(name, getattr(polyclinic, name)) for name in classes)]
    parts += ["## Other names", *(_entry(name, getattr(polyclinic, name)) for name in others)]
    for package in PACKAGES:
        parts.append(_package(package, getattr(polyclinic, package)))
    return "\n\n".join(parts) + "\n"


def _package(name: str, module: Any) -> str:
    entries = [_entry(f"{name}.{one}", getattr(module, one)) for one in module.__all__]
    parts = [f"## polyclinic.{name}", _sentences(module), *entries]
    return "\n\n".join(parts)


def _class(name: str, kind: type) -> str:
    parts = [_entry(name, kind)]
    for method, function in vars(kind).items():
        shown = inspect.isfunction(function) or isinstance(function, (property, classmethod, staticmethod))
        if shown and not method.startswith("_") and inspect.getdoc(getattr(kind, method)):
            parts.append(f"- `{method}{_signature(getattr(kind, method))}`: {_first(getattr(kind, method))}")
    return "\n\n".join(parts[:1]) + ("\n\n" + "\n".join(parts[1:]) if parts[1:] else "")


def _entry(name: str, value: Any) -> str:
    signature = "" if inspect.isclass(value) and issubclass(value, Settings) else _signature(value)
    shown = f"```text\n{name.split('.')[-1]}{signature}\n```\n\n" if signature else ""
    return f"### {name}\n\n{shown}{_sentences(value)}"


def _signature(value: Any) -> str:
    if isinstance(value, property) or not callable(value):
        return ""
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    return re.sub(r"\b(?:[a-z_]\w*\.)+(\w+)", r"\1", text).replace("'", "")


def _sentences(value: Any) -> str:
    """The docstring, as Markdown: lines that are indented stay as they are written."""
    text = (value.__doc__ if inspect.isclass(value) else inspect.getdoc(value)) or ""
    return inspect.cleandoc(text) if not _is_alias(value) else ""


def _is_alias(value: Any) -> bool:
    """Types such as `Weights = dict[str, Tensor]` have the docstring of `dict`."""
    return not (inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value))


def _first(value: Any) -> str:
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
