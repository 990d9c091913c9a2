"""Statistics of the released model that deployed sites compute from their own cases (`evaluation.statistics`)."""

from __future__ import annotations

from collections.abc import Callable

from polyclinic.errors import WorkFailed
from polyclinic.federation.federation import Federation, Weights
from polyclinic.federation.ledger.parcel import ParcelRejected
from polyclinic.methods.evaluate_only import EvaluateOnly
from polyclinic.methods.shared.safe_statistics import SafeStatistics, check_told, joined
from polyclinic.study import Study


def more_operations(study: Study, first_weights: Callable[[str], Weights | None]) -> tuple[object, ...]:
    """Operations that a study's sites have beside those of its method."""
    noised = study.privacy is not None and study.privacy.score_noise is not None
    if noised or not study.evaluation.statistics or study.evaluation.final != "test":
        return ()  # beside scores with noise no exact figure may stand
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
