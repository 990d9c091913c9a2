"""A study: what a user writes down. Validated as a whole, with errors that name the field and the cure.

study = load_study(Path("study.toml"), ["method.rounds=5"])
study = Study(data={"source": "fundus-phantom"}, sites={"partition": "iid", "count": 4}, method={"name": "cwt"})
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyclinic.study.reading import load_run_study, load_study
    from polyclinic.study.study import Study, parse_study

__all__ = ["Study", "load_run_study", "load_study", "parse_study"]


_HOMES = {"Study": "study", "load_run_study": "reading", "load_study": "reading", "parse_study": "study"}


def __getattr__(name: str) -> Any:
    """Imported when first asked for: presets, which lie in this folder, need neither networks nor torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"polyclinic.study.{_HOMES[name]}"), name)
