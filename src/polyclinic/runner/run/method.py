"""The coordinator half of a method: a failure in somebody else's code is one sentence with the file and the line."""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from polyclinic.errors import BadInput, RunPaused, WorkFailed
from polyclinic.federation.federation import Federation, Weights
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.methods import Method
from polyclinic.plugins import foreign_modules
from polyclinic.questions.evaluate import EvaluateOnly
from polyclinic.questions.statistics import SafeStatistics, check_told, joined
from polyclinic.registry import reason
from polyclinic.study import Study

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
        places = [getattr(sys.modules.get(one), "__file__", None) for one in foreign_modules(type(method))]
        files = [Path(file) for file in places if file]
        if not files:
            raise
        file, line = _place(error, files)
        raise WorkFailed(
            f"method '{method.name}' failed at the coordinator in {file}, line {line}: {reason(error)}; mend it, or "
            "set POLYCLINIC_TRACEBACK=1 to see all calls"
        ) from error


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


def has_noised_scores(study: Study) -> bool:
    """Whether scores leave with noise, beside which no exact figure may stand."""
    return study.privacy is not None and study.privacy.score_noise is not None


def more_operations(study: Study, first_weights: Callable[[str], Weights | None]) -> tuple[object, ...]:
    """Operations that a study's sites have beside those of its method."""
    if has_noised_scores(study) or not study.evaluation.statistics or study.evaluation.final != "test":
        return ()
    if isinstance(study.method, EvaluateOnly):  # which asks for statistics itself, and a site tells them once
        return ()
    ends_early = study.method.patience is not None
    return (SafeStatistics(first_weights, study.method.rounds, ends_early=ends_early),)


def ask_statistics(federation: Federation, study: Study, weights: Weights, own: str) -> None:
    """Have the sites tell statistics of the released model, where the study asks for them. What does not fit is left
    out with a warning: the run is over."""
    if not more_operations(study, lambda _: None):
        return
    classes, found = federation.trainer.target.classes, []
    try:
        replies = federation.ask_all("give_statistics", weights=weights, own=own)
    except WorkFailed as error:  # such as too few test images everywhere
        federation.warn(f"there are no statistics of the sites: {error}")
        return
    for reply in replies:
        try:
            check_told(reply.parcel("statistics").tensors, len(classes))
            found.append(reply)
        except ParcelRejected as error:
            federation.warn(f"the statistics of site '{reply.site}' are left out: {error}")
    federation.report("safe_statistics", joined(found, classes))
