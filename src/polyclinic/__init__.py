"""Polyclinic: hospitals train medical-imaging models together without sharing their images.

import polyclinic

study = polyclinic.load_study("study.toml")
result = polyclinic.run(study, "runs/first")
print(result.metrics["test"])
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["BadInput", "Result", "Study", "WorkFailed", "__version__", "load_study", "run"]

if TYPE_CHECKING:
    from polyclinic.errors import BadInput, WorkFailed
    from polyclinic.runner.result import Result
    from polyclinic.runner.run import run
    from polyclinic.study import Study, load_study

_HOMES = {"BadInput": "errors", "WorkFailed": "errors", "Result": "runner.result", "run": "runner.run"}
_HOMES |= {"Study": "study", "load_study": "study"}


def __getattr__(name: str) -> Any:
    # torch takes a second to import: only who needs it pays
    if name not in _HOMES:
        raise AttributeError(f"module 'polyclinic' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(f"polyclinic.{_HOMES[name]}"), name)
