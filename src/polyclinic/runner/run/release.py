"""The released model: which one it is, and its test metrics."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from statistics import mean, stdev

import torch
from torch import Tensor

from polyclinic.federation.federation import Federation, Weights
from polyclinic.json_types import JsonMapping, JsonObject
from polyclinic.runner.run.recorder import Recorder, mean_of, score
from polyclinic.study import Study

#: models by the site they belong to; one model for all sites stands under ""
Models = dict[str, dict[str, Tensor]]


def released_models(federation: Federation, recorder: Recorder, last: Weights) -> Models:
    """The selected model: one for all sites, or where a part of it stays at the sites, one of each site."""
    selected = {name: tensor.cpu() for name, tensor in (recorder.best_weights or last).items()}
    if not recorder.has_local or not federation.engine.simulation:  # what stays at a real site nobody else sees
        return {"": dict(selected)}
    group = "best" if recorder.best_round else "local"
    common = {**federation.trainer.initial_local, **selected}
    states = {site: federation.simulated_state(site) for site in federation.sites}
    own = {site: state.group(group) or state.group("local") for site, state in states.items()}  # kept at the sites
    # a site that keeps all of its model may have another network than the coordinator
    return {site: part if part and not selected else common | part for site, part in own.items()}


#: what scores are of where each site has a model of its own
OF_ALL = "mean over the sites' models, each on the images of all sites"
OF_OWN = "all images together, each judged by its own site's model only"


def final_metrics(federation: Federation, study: Study, models: Models, personal: bool) -> JsonObject:
    """Metrics of the released models on test images, computed once. Where each site has a model of its own, `test` is
    the mean over the models, each on the images of all sites, and `per_site` is each site's model on its own images.

    With `evaluation.final = "validation"` the same on validation images, as `validation`; nothing is tested. With
    "none" no site is asked.
    """
    split = study.evaluation.final
    if split == "none":
        return _tables("test", {"pooled": {}, "mean": {}, "per_site": {}})
    if "" in models:
        part = whose_part(study, personal)
        replies = federation.ask_all("evaluate", weights=models[""], split=split, own=part)
        return _tables(split, score(study.task, replies) or {"pooled": {}, "mean": {}, "per_site": {}})
    of_model = {}
    for site, weights in models.items():
        replies = federation.ask_all("evaluate", counted=False, weights=weights, split=split, own="none")
        of_model[site] = score(study.task, replies) or {"pooled": {}, "per_site": {}}
    own = {site: scored["per_site"].get(site, {}) for site, scored in of_model.items()}
    table = {"pooled": mean_of([s["pooled"] for s in of_model.values()]), "mean": mean_of(list(own.values()))}
    tables = {
        **_tables(split, {**table, "per_site": own}),
        "models_judged": {split: OF_ALL, "intervals.pooled": OF_OWN},
    }
    if split == "validation":
        return tables
    across = {site: scored["per_site"] for site, scored in of_model.items()}
    return {**tables, "across_sites": across, "convergence": convergence(across)}


def whose_part(study: Study, personal: bool) -> str:
    """Which part of its own a site adds to the released model: none, or the best round's or the last one's."""
    return "none" if not personal else "best" if study.evaluation.select == "best" else "current"


def convergence(across: Mapping[str, Mapping[str, Mapping[str, float]]]) -> JsonObject:
    """How far the sites' models agree: for the images of each site and each metric, mean and standard deviation over
    the models (`across`: by model, by site of the images, by metric)."""
    found: JsonObject = {}
    for site in across:
        scores = [of_model[site] for of_model in across.values() if site in of_model]
        names = sorted({name for one in scores for name in one})
        values = {name: [one[name] for one in scores if name in one] for name in names}
        found[site] = {name: {"mean": mean(some), "std": stdev(some)} for name, some in values.items() if some[1:]}
    return found


def _tables(split: str, scored: JsonMapping) -> JsonObject:
    if split == "validation":
        return {"test": {}, "mean": {}, "per_site": {}, "validation": dict(scored)}
    return {"test": scored["pooled"], "mean": scored["mean"], "per_site": scored["per_site"]}


def _flat(models: Models) -> dict[str, Tensor]:
    named = {f"{site}/{n}" if site else n: t for site, model in models.items() for n, t in model.items()}
    return {name: tensor.contiguous().clone() for name, tensor in named.items()}


def digest_of_weights(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, types, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
