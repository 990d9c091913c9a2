"""Worth of a site: what each site adds to the common model, by leave-one-out and by Shapley values.

The value of a coalition of sites is how good a model trained by them alone is on the validation images of all sites.
For `analytic` it follows from the sites' open sums, exactly (minus the mean squared error, or another score of the head
that they give), and so it does for linear `gaussian-heads`; for any other method the study is run again for each
coalition of simulated sites. At deployed sites `method.worth` asks for the sums.
"""

import functools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyclinic.data.parts import PreparedSites, SiteData, open_site, prepare
from polyclinic.errors import BadInput
from polyclinic.json_types import JsonObject
from polyclinic.methods.analytic import Analytic, shares_of, worth_from_sums
from polyclinic.methods.gaussian_heads import GaussianHeads
from polyclinic.methods.shared import one_round
from polyclinic.methods.shared.one_round import Moments, scaled_targets
from polyclinic.metrics.statistics.shapley import EXACT
from polyclinic.runner.run.assembly import Assembly
from polyclinic.runner.run.engines import in_process_engine
from polyclinic.study import Study


def worth(
    study: Study, *, retrainings: int | None = None, metric: str | None = None, cache: Path | None = None
) -> JsonObject:
    """Leave-one-out and Shapley values of each site. `retrainings`: runs of the study that a method other than
    `analytic` may take; all coalitions are tried if it is enough for them. `metric`: what a model is worth, by the
    sites' validation scores; for `analytic` minus the squared error if not given, else the study's."""
    if study.federation.sum == "secure":
        raise BadInput(
            "federation.sum: the worth of a site needs the sums of coalitions, and two give a site's own sum away; "
            "set federation.sum = 'float' (in a simulation), or do without"
        )
    parts = prepare(study.data, study.sites, cache=cache)
    names = list(parts.names)
    if len(names) < 2:
        raise BadInput("sites: the worth of one site beside no other is not defined; take two sites or more")
    if metric is not None:
        study = study.with_settings({"evaluation.metric": metric})
    if isinstance(study.method, Analytic):
        return _from_sums(study, parts, names, metric)
    if isinstance(study.method, GaussianHeads) and study.method.head == "linear":
        return _from_sums(study, parts, names, study.evaluation.metric or study.task.metric)
    return _by_retraining(study, parts, names, retrainings, cache)


# --- from open sums ----------------------------------------------------------------------------------


def _from_sums(study: Study, parts: PreparedSites, names: list[str], metric: str | None) -> JsonObject:
    method: Any = study.method
    with tempfile.TemporaryDirectory() as folder:
        assembly = Assembly(study, parts, Path(folder))
        train = _sums_of(assembly, names, "train")
        if metric is None:
            return worth_from_sums(train, _sums_of(assembly, names, "validation"), method.head_of)
        held_out = list(_validation_of(assembly, names))
    if not held_out:
        raise BadInput("data.validation: no site has validation images to score; set a share above 0")

    @functools.cache
    def game(some: frozenset[str]) -> float:
        """The validation score of the head that these sites' sums give, added up over all sites' own scores."""
        sums, outputs = [], next(iter(train.values())).in_units()[1].shape[1]
        head = torch.zeros(held_out[0][0].shape[1] + 1, outputs, dtype=torch.float64)
        if some:
            head = method.head_of(reduce(add, (train[name] for name in sorted(some))))
        for features, targets, cases, trainer in held_out:
            said = (head[0] + features @ head[1:]).float()
            seen = trainer.task.observe(said, targets, trainer.target)
            sums.append(trainer.task.sums(seen, targets, cases, trainer.target))
        return _ranked(study, study.task.finish(reduce(study.task.add, sums)))

    value = f"validation {metric} over the images of all sites (better is higher)"
    how = f"exact, from the sites' sums; {2 ** min(len(names), EXACT)} coalitions at most"
    return shares_of(names, game, value, how)


def _validation_of(assembly: Assembly, names: list[str]) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Any]]:
    """Features float64 [N, k] of each site's validation images, and what its scores are added up by."""
    host = assembly.host()
    method: Any = assembly.study.method
    for name in names:
        site = host.sites.get(name)
        part = site.data.validation
        if len(part):
            site.data = replace(site.data, train=part)
            cases = None if part.cases is None else torch.from_numpy(np.array(part.cases))
            targets = torch.from_numpy(np.array(part.labels))
            yield torch.from_numpy(np.array(method.features(site))).double(), targets, cases, site.trainer


def _ranked(study: Study, scored: dict[str, float]) -> float:
    """The score of the study's metric, higher for a better model."""
    metric = study.evaluation.metric or study.task.metric
    ranked = study.task.rank(scored, metric)
    return ranked[0] if ranked is not None else scored[metric]


def _sums_of(assembly: Assembly, names: list[str], split: str) -> dict[str, Moments]:
    """The sums of each simulated site over one split of its images."""
    host = assembly.host()
    method: Any = assembly.study.method
    found = {}
    for name in names:
        site = host.sites.get(name)
        data: SiteData = site.data
        site.data = replace(data, train=getattr(data, split))
        found[name] = one_round.moments(method.features(site), scaled_targets(site), site.trainer.device)
        site.data = data
    return found


# --- by training again --------------------------------------------------------------------------------


def _by_retraining(
    study: Study, parts: PreparedSites, names: list[str], retrainings: int | None, cache: Path | None
) -> JsonObject:
    needed, least = 2 ** len(names) - 1, min(2 ** len(names) - 1, 3 * len(names) + 1)
    if retrainings is None:
        raise BadInput(
            f"--retrainings: '{study.method.name}' must be trained again for each coalition of sites; all of them are "
            f"{needed:,} runs: write --retrainings {needed}, or fewer for values with intervals (at least {least})"
        )
    if retrainings < least:
        raise BadInput(f"--retrainings: {retrainings} are too few for {len(names)} sites; {least} is the least")
    game = functools.cache(functools.partial(_trained_value, study, parts))
    metric = study.evaluation.metric or study.task.metric
    value = f"validation {metric} over the images of all sites (better is higher)"
    orders = None if needed <= retrainings else (retrainings - len(names) - 1) // len(names)
    found = shares_of(names, game, value, "", orders)
    how = "" if orders is None else f", {orders} random orders of the sites"
    game(frozenset())  # the first weights, which no run makes
    return found | {"how": f"{game.cache_info().currsize - 1} runs of the study{how}"}


def _trained_value(study: Study, parts: PreparedSites, some: frozenset[str]) -> float:
    """The score of a model that these sites train (without any: the first weights) on the validation images of all."""
    from polyclinic.federation.collaborators import Observer
    from polyclinic.federation.federation import Federation
    from polyclinic.runner.run.method import run_method

    with tempfile.TemporaryDirectory() as folder:
        chosen = PreparedSites(parts.folder, tuple(name for name in parts.names if name in some), parts.info)
        assembly = Assembly(study, chosen, Path(folder))
        trainer = assembly.trainer()
        weights = assembly.initial_weights()
        if some:
            engine = in_process_engine(assembly)
            try:
                federation = Federation(assembly.federation_spec(trainer), engine, Observer())
                weights = dict(run_method(study.method, federation))
            finally:
                engine.close()
        trainer.load(weights)
        sums = [trainer.evaluate(open_site(parts.folder, name).validation) for name in parts.names]
        return _ranked(study, study.task.finish(reduce(study.task.add, sums)))
