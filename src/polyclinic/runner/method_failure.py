"""The coordinator half of a method: a failure in somebody else's code is one sentence with the file and the line."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from polyclinic.errors import BadInput, RunPaused, WorkFailed
from polyclinic.federation.federation import Federation, Weights
from polyclinic.methods import Method
from polyclinic.plugins import foreign_modules
from polyclinic.registry import reason

OURS = Path(__file__).parents[1]


def run_method(method: Method, federation: Federation) -> Weights:
    """The method's last weights; WorkFailed, with file and line, where a method of a plug-in raises.

    A method of our own that raises has a bug: its traceback is for us.
    """
    try:
        return method.run(federation)
    except (BadInput, WorkFailed, RunPaused):
        raise
    except Exception as error:
        files = _foreign_files(method)
        if not files:
            raise
        file, line = _place(error, files)
        raise WorkFailed(
            f"method '{method.name}' failed at the coordinator in {file}, line {line}: {reason(error)}; mend it, or "
            "set POLYCLINIC_TRACEBACK=1 to see all calls"
        ) from error


def _foreign_files(method: Method) -> list[Path]:
    """The files of the method's classes that are not our own."""
    found = [getattr(sys.modules.get(module), "__file__", None) for module in foreign_modules(type(method))]
    return [Path(file) for file in found if file]


def _place(error: Exception, files: list[Path]) -> tuple[str, int | None]:
    """The innermost line in the folder of one of the files, and not in ours; else the innermost of all."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [
        frame
        for frame in frames
        if any(Path(frame.filename).is_relative_to(file.parent) for file in files)
        and not Path(frame.filename).is_relative_to(OURS)
    ]
    frame = (theirs or list(frames))[-1]
    return frame.filename, frame.lineno
