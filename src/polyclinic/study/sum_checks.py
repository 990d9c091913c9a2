"""Sums of the sites' answers (`[federation]`) that cannot work, each with the cure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyclinic.errors import BadInput
from polyclinic.federation.sums.settings import FEWEST, MOST_SITES, Federated

if TYPE_CHECKING:
    from polyclinic.study.tables import Study


def check_sums(study: Study) -> None:
    """BadInput if the study's method, sites or defence do not go with the way its answers are added up."""
    settings = study.federation
    _check_unused(settings)
    _check_label_sets(study)
    if settings.sum == "float":
        return
    if study.engine.wire != "exact":
        raise BadInput(
            f"engine.wire: '{study.engine.wire}' would change the whole numbers of a sum (federation.sum = "
            f"'{settings.sum}'); set engine.wire = 'exact', or federation.sum = 'float'"
        )
    if obstacle := study.method.sum_obstacle():
        raise BadInput(obstacle)
    count = len(study.sites.site_names() or ())
    if count > MOST_SITES:
        raise BadInput(f"federation.sum: whole numbers take up to {MOST_SITES:,} sites; set federation.sum = 'float'")
    if settings.sum == "secure":
        _check_secure(study, count)


def _check_unused(settings: Federated) -> None:
    usual = Federated()
    if settings.sum != "secure" and settings.threshold != usual.threshold:
        raise BadInput("federation.threshold: is of secure sums; set federation.sum = 'secure', or leave it out")
    if settings.sum != "secure" and settings.liars != usual.liars:
        raise BadInput("federation.liars: is of secure sums; set federation.sum = 'secure', or leave it out")


def _check_label_sets(study: Study) -> None:
    """BadInput where sites know different classes, and the method would make the model unlearn some."""
    if not study.federation.label_sets:
        return
    setting = "federation.label_sets"
    if study.task.like != "classification":
        raise BadInput(f"{setting}: {study.task.like} has no classes; take it out")
    if not study.method.traits.label_sets:
        raise BadInput(
            f"{setting}: with '{study.method.name}' a site that does not know a class makes the common model unlearn "
            "it; choose fedavg, fedprox, gaussian-heads or analytic, or take the classes out of the data"
        )
    if study.privacy is not None or "mixup" in study.optimizer.augment or study.replay is not None:
        raise BadInput(f"{setting}: does not go with [privacy], [replay] or mixup; take one of the two out")


def _check_secure(study: Study, count: int) -> None:
    settings, fraction = study.federation, study.method.fraction
    asked = max(1, round(fraction * count)) if count else 0
    if count and asked < FEWEST:
        raise BadInput(
            f"federation.sum: a secure sum of {asked} sites would show what a single one sent; take {FEWEST} sites or "
            "more in each round, or set federation.sum = 'integer'"
        )
    if asked and settings.liars >= settings.fewest_of(asked):
        raise BadInput(
            f"federation.liars: {settings.liars} of the {settings.fewest_of(asked)} sites that open a sum may not all "
            "lie; take fewer, or a higher federation.threshold"
        )
