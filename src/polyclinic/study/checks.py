"""Combinations of settings that cannot work, each with the cure; `ignored` has those that have no effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from polyclinic import models
from polyclinic.data.source import AtSites, LabelledSource
from polyclinic.errors import BadInput
from polyclinic.generators.base import SMALLEST_IMAGE
from polyclinic.methods import METHODS
from polyclinic.methods.shared.generative_replay import GenerativeReplay
from polyclinic.methods.shared.method import Method, OwnModels, ReplayMethod
from polyclinic.models.encoders import ENCODERS
from polyclinic.models.imported import Imported, channels_of
from polyclinic.privacy.dp_sgd import BATCH_NORM, mixes_samples, obstacles
from polyclinic.randomness import torch_rng
from polyclinic.registry import notice_once, reason
from polyclinic.settings import no_such_choice

if TYPE_CHECKING:
    from polyclinic.study.study import Study


def check_task(study: Study) -> None:
    """BadInput if the data, the network or the method cannot do the study's task."""
    task, method = study.task.like, study.method
    if task not in study.data.tasks:
        can = ", ".join(study.data.tasks)
        raise BadInput(f"task.name: '{study.data.source}' has no labels for {task}; it is for {can}")
    if study.data.volumes and (obstacle := _method_obstacle(study)):
        raise BadInput(obstacle)
    if task not in method.traits.tasks:
        can = ", ".join(name for name, kind in METHODS.working().items() if task in kind.traits.tasks)
        tasks = ", ".join(method.traits.tasks)
        raise BadInput(f"task.name: method '{method.name}' is for {tasks}, not {task}; choose one of {can}")
    _check_label_range(study, task)
    _check_several(study)
    for setting in ("test_per_class", "test_total_per_class"):
        if task == "regression" and getattr(study.data, setting) is not None:
            raise BadInput(f"data.{setting}: the labels of regression are values and have no classes; leave it out")
    _check_volumes(study)
    if backbone_of(study).dense != study.task.dense:
        raise BadInput(f"model.backbone: '{study.model.backbone}' cannot do {task}; choose {_fitting(study)}")
    for site, backbone in study.model.backbones.items():
        if not isinstance(method, OwnModels):
            can = ", ".join(name for name, kind in METHODS.working().items() if issubclass(kind, OwnModels))
            raise BadInput(f"model.backbones: '{method.name}' needs one network at all sites; choose one of {can}")
        known = models.is_importable(backbone) or backbone in models.registry_of(backbone)
        if not known or models.find(backbone, size=study.data.size).dense != study.task.dense:
            raise BadInput(f"model.backbones: '{backbone}' of site '{site}' cannot do {task}; choose {_fitting(study)}")
    method.check_task(task)


def _check_several(study: Study) -> None:
    """BadInput unless data and task are both for several labels an image, and the method and settings can do that."""
    several, method = getattr(study.data, "several", None), study.method
    if study.task.name != "multilabel":
        if several:
            raise BadInput("data.several: is for several labels an image; set task.name = 'multilabel', or drop it")
        return
    if not several:
        raise BadInput("data.several: multilabel needs the sign between the labels of a cell, '|', or columns' names")
    if method.traits.trains != "network" or isinstance(method, GenerativeReplay) or method.needs_generator():
        can = "choose fedavg or a method built on it, cwt, centralized or standalone"
        raise BadInput(f"method.name: '{method.name}' learns one class an image, and not several labels; {can}")
    asked = {"evaluation.statistics": study.evaluation.statistics, "federation.label_sets": study.federation.label_sets}
    asked["policy.scores"] = study.policy.scores == "coarse"
    if name := next((name for name, value in asked.items() if value), ""):
        raise BadInput(f"{name}: is for one class an image, and not for several labels; leave it out")


def _check_volumes(study: Study) -> None:
    """BadInput unless data, task and network are all for volumes, or all for images."""
    data, what = study.data, "volumes" if study.data.volumes else "images"
    if study.task.volumes != data.volumes:
        other = "volume-segmentation" if data.volumes else "segmentation"
        raise BadInput(
            f"task.name: '{data.source}' gives {what}, and '{study.task.name}' is not for them; take {other}"
        )
    if data.volumes and study.model.input_size is not None:
        raise BadInput("model.input_size: volumes are not resized; set preparation.spacing in [data], and leave it out")
    if backbone_of(study).volumes != data.volumes:
        raise BadInput(
            f"model.backbone: '{study.model.backbone}' is not for {what}, which '{data.source}' gives; choose "
            f"{_fitting(study)}"
        )
    found = next((name for name in ("replay", "privacy", "poisoning") if getattr(study, name) is not None), None)
    if data.volumes and found:
        raise BadInput(f"{found}: is for images, not for volumes; take the table out")


def _method_obstacle(study: Study) -> str | None:
    """Why the method cannot do volumes, with the cure."""
    method = study.method
    can = "choose fedavg or a method built on it, fedreplay, splitnn, cwt, centralized or standalone"
    replays = method.name in METHODS and issubclass(METHODS[method.name], GenerativeReplay)  # a question is none
    if replays or method.name == "felicia" or method.needs_generator():
        return f"method.name: '{method.name}' trains a generator of images, and there is none of volumes; {can}"
    others = method.traits.needs_encoder or method.name == "fedavg-share"  # which gives images of one shape away
    if others or study.task.like not in method.traits.tasks:
        return f"method.name: '{method.name}' is for images, not for volumes; {can}"
    return None


def _check_label_range(study: Study, task: str) -> None:
    """BadInput where values are to be predicted, and nobody says between which bounds; or the other way round."""
    if not isinstance(study.data, LabelledSource):
        return
    bounds = study.data.label_range
    if task == "regression" and bounds is None:
        raise BadInput(
            "data.label_range: missing; regression predicts a value, so give the lowest and the highest one that is "
            "possible, for example label_range = [0, 228]"
        )
    if task == "classification" and bounds is not None:
        raise BadInput(
            "data.label_range: labels are values with it, and classification needs classes; set task.name = "
            "'regression', or take data.label_range out"
        )


def check_model(study: Study) -> None:
    """BadInput if the network lacks what the study wants of it."""
    model, method = study.model, study.method
    for name in dict.fromkeys((model.backbone, *model.backbones.values())):
        if not models.is_importable(name) and name in models.BACKBONES and name not in models.BACKBONES.builtin:
            try_network(name, models.BACKBONES[name], study.data.size, model.norm)
    cuts = cuts_of(study)
    if not cuts and (model.cut is not None or method.traits.needs_cut):
        why = f"'{method.name}' cuts the network" if method.traits.needs_cut else "the study sets model.cut"
        raise BadInput(
            f"model.backbone: '{model.backbone}' cannot be cut, and {why}; choose one of "
            f"{', '.join(models.BACKBONES.builtin)}, or an importable nn.Sequential"
        )
    if model.cut is not None and model.cut not in cuts:
        raise BadInput(f"model.cut: {model.backbone} has no cut '{model.cut}'; choose one of {', '.join(cuts)}")
    _check_first_weights(study, cuts)
    method.check_cuts(model.backbone, cuts)
    deployed_weights = model.weights != models.RANDOM and isinstance(study.data, AtSites)
    may_keep = model.batch_norm == "local" or type(method).local_names is not Method.local_names  # seen without torch
    if deployed_weights and may_keep and method.local_names(network_of(study), model.batch_norm):
        raise BadInput(
            f"model.weights: sites of '{method.name}' keep a part of the network, which at a deployed site would not "
            "begin with the file's weights; choose a method that sends all of it, and model.batch_norm = 'average'"
        )
    if model.batch_norm == "local" and method.traits.batch_norm == "average":
        raise BadInput(f"model.batch_norm: '{method.name}' cannot keep it local; set model.batch_norm = 'average'")
    if method.traits.batch_norm == "local" and not has_batch_norm(study):
        raise BadInput(
            f"method.name: {method.name} keeps batch-norm layers at the sites, and {model.backbone} with "
            f"model.norm = '{model.norm}' has none; choose a backbone with batch norm"
        )


def check_training(study: Study) -> None:
    """BadInput if images, rounds or scores cannot be treated as the study wants."""
    method, optimizer, evaluation, task = study.method, study.optimizer, study.evaluation, study.task
    if "mixup" in optimizer.augment and method.traits.trains not in ("network", "nothing"):
        raise BadInput(f"optimizer.augment: '{method.name}' cannot mix images; take 'mixup' out")
    if optimizer.balanced_batches and task.like != "classification":
        raise BadInput(f"optimizer.balanced_batches: {task.like} has no classes to draw; set it to false")
    metrics = [task.metric, *(name for name in task.more_metrics if name != task.metric)]
    if evaluation.metric is not None and evaluation.metric not in metrics:
        raise BadInput(f"evaluation.metric: {no_such_choice(evaluation.metric, metrics)}")
    if method.patience is not None and evaluation.every == 0:
        raise BadInput(
            "method.patience: nothing is scored on validation images; set evaluation.every = 1, or take "
            "method.patience out"
        )


def _check_first_weights(study: Study, cuts: tuple[str, ...]) -> None:
    """BadInput if the network cannot begin with the weights that the study or its method wants."""
    model, method = study.model, study.method
    if model.freeze is not None and model.freeze not in cuts:
        raise BadInput(f"model.freeze: {model.backbone} has no cut '{model.freeze}'; choose one of {', '.join(cuts)}")
    if model.norm == "frozen" and model.weights == models.RANDOM:
        raise BadInput(
            "model.norm: 'frozen' keeps the statistics of the first weights, and random weights have none; set "
            "model.weights to 'public' or a file, or model.norm to 'batch'"
        )
    if method.needs_first_weights() and model.weights == models.RANDOM:
        raise BadInput(
            f"model.weights: '{method.name}' keeps the first weights up to the cut, as method.front is 'public', and "
            "they are random; set model.weights to 'public' or a file"
        )
    if model.weights == models.PUBLIC and not issubclass(backbone_of(study), models.Encoded):
        models.check_public_weights(model.backbone)
    if method.traits.needs_encoder and not issubclass(backbone_of(study), models.Encoded):
        can = ", ".join(name for name in ENCODERS.working() if name not in models.BACKBONES)
        raise BadInput(
            f"model.backbone: '{method.name}' fits a head on an encoder that nobody trains, and '{model.backbone}' is "
            f"trained; choose one of {can}, and on a CPU model.input_size = 128, which is three times as fast as 224"
        )


def check_replay(study: Study) -> None:
    """BadInput if the study replays and cannot."""
    if study.replay is None:
        return
    if not isinstance(study.method, GenerativeReplay):
        can = ", ".join(name for name, method in METHODS.working().items() if issubclass(method, ReplayMethod))
        raise BadInput(f"replay: '{study.method.name}' cannot replay; take the table out, or choose one of {can}")
    if study.replay.codes not in ("prior", "samples") and not study.generator.has_codes:
        raise BadInput(
            f"generator.name: '{study.generator.name}' has no codes to replay; "
            "set replay.codes = 'prior' or 'samples' to replay its samples, or choose vqvae2"
        )
    if study.replay.codes == "prior" and study.task.dense:
        raise BadInput("replay.codes: samples of a prior have no masks; choose final-encoder for segmentation")
    if study.in_latents:
        _check_latents(study, "replay.space = 'latents'")
        if not study.method.traits.takes_frozen_features or not study.generator.learns_maps:
            raise BadInput(
                f"replay.space: '{study.method.name}' with '{study.generator.name}' cannot; choose cwt-replay "
                "or fedavg-replay, and vqvae2 or flow"
            )


def _check_latents(study: Study, said: str) -> None:
    """BadInput if there are no latents that a generator could learn, or no batch could take them."""
    model, encoder = study.model, issubclass(backbone_of(study), models.Encoded)
    if (model.freeze is None or model.weights == models.RANDOM) and not (encoder and study.method.learns_features):
        raise BadInput(
            f"model.freeze: {said} replays what frozen layers with public weights give; set model.freeze to a cut and "
            "model.weights to 'public' or a file"
        )
    if model.cut not in (None, model.freeze):
        raise BadInput(f"model.cut: {said} cuts after model.freeze, '{model.freeze}'; leave model.cut out")
    if study.optimizer.augment:
        raise BadInput(f"optimizer.augment: {said} has no images to change; set optimizer.augment = []")
    if model.freeze is not None and not encoder and not gives_square_map(study, model.freeze):
        raise BadInput(f"model.freeze: '{model.freeze}' gives no square map for an image; choose an earlier cut")


def check_tuning(study: Study) -> None:
    """BadInput if the study wants a generator trained in phases that cannot be, or that nobody trains."""
    if (study.method.needs_generator() or study.replay) and study.data.size < SMALLEST_IMAGE:
        raise BadInput(f"data.size: generators need images of {SMALLEST_IMAGE} px or more, not {study.data.size}")
    if study.tuning is None or not study.tuning.on:
        return
    if not study.method.tunes_generator():
        raise BadInput(f"tuning: '{study.method.name}' trains no generator that way; take the table out")
    if not study.generator.tunable:
        raise BadInput(
            f"tuning: '{study.generator.name}' is not trained step by step; set tuning.on = false, or choose a GAN"
        )
    own, most = getattr(study.generator, "steps", None), study.tuning.most_steps
    usual = own is None or own == type(study.generator).model_fields["steps"].default
    if not usual and most is not None and most != own:
        notice_once(
            f"generator.steps: {own} is not used, as tuning.most_steps = {most} says how long the generator is "
            "trained; take one of the two out, or set tuning.on = false"
        )


def check_generator(study: Study) -> None:
    """BadInput if the study's generator cannot make what the method or replay wants of it."""
    generator, method, task = study.generator, study.method, study.task.like
    if not method.needs_generator() and study.replay is None:
        return
    generator.check_images(study.data.size, task)
    method.check_generator(generator, task)
    if getattr(generator, "space", None) == "features":
        if not method.learns_features:
            raise BadInput(
                "generator.space: 'features' is for fedsamples; choose that, or set generator.space = 'pixels' (and "
                "where sites replay features, replay.space = 'latents')"
            )
        _check_latents(study, "generator.space = 'features'")
    samples = method.needs_generator() or (study.replay is not None and study.replay.codes in ("prior", "samples"))
    if samples and (obstacle := generator.sampling_obstacle()):
        raise BadInput(obstacle)


def check_sites(study: Study) -> None:
    """BadInput if a setting does not go with the study's sites; those that only the data know are checked later."""
    names = study.sites.site_names()
    if not names:
        return
    study.method.check_sites(names)
    check_names_of_sites(study, names)


def check_names_of_sites(study: Study, names: Sequence[str]) -> None:
    """BadInput where a setting by site names one that there is not."""
    by_site = {"model.backbones": [*study.model.backbones], "optimizer.batch_sizes": [*study.optimizer.batch_sizes]}
    for setting, sites in by_site.items():
        unknown = [site for site in sites if site not in names]
        if unknown:
            raise BadInput(f"{setting}: there is no site '{unknown[0]}'; the sites are {', '.join(names)}")


#: in this order: each relies on those before it
CHECKS = (check_task, check_model, check_training, check_replay, check_tuning, check_generator, check_sites)


def _fitting(study: Study) -> str:
    """The backbones that can do the study's task."""
    kinds, task = models.BACKBONES.working().items(), study.task
    return ", ".join(name for name, kind in kinds if (kind.dense, kind.volumes) == (task.dense, task.volumes))


def backbone_of(study: Study) -> type[models.Backbone]:
    return models.find(study.model.backbone, size=study.data.size, arguments=study.model.arguments)


def cuts_of(study: Study) -> tuple[str, ...]:
    return tuple(backbone_of(study).stages)[:-1]


def network_of(study: Study) -> models.Backbone:
    """The study's network, for a look at its layers; its weights are not needed, and have no memory where possible."""
    return backbone_of(study).without_weights(study.data.size, study.model.norm)


def has_batch_norm(study: Study) -> bool:
    """Whether the study's network has batch-norm layers."""
    said = _said_norm_layers(backbone_of(study))
    return bool(models.norm_names(network_of(study))) if said is None else said and study.model.norm == "batch"


def gives_square_map(study: Study, cut: str) -> bool:
    """Whether a stage gives a square map for a square image, and no vector. Of the package's networks only encoders
    that nobody trains end in a vector before the head; anybody else's is asked with an image that has no memory."""
    kind = backbone_of(study)
    if _said_norm_layers(kind) is not None:
        return not issubclass(kind, models.Encoded)
    shape = shape_at(study, cut)
    return len(shape) == 3 and shape[1] == shape[2]


def shape_at(study: Study, cut: str) -> tuple[int, ...]:
    """The shape of what a stage gives for one image of the study."""
    network, size = network_of(study), study.data.size
    network.resize_to(study.model.input_size or backbone_of(study).input_side(size), size)
    front = models.split(network.eval(), cut)[0]
    return tuple(front(torch.zeros(1, 1, size, size, device="meta")).shape[1:])


def network_obstacle(study: Study) -> str | None:
    """Why the study's network cannot be trained with differential privacy: a sentence with the cure, or None."""
    if _said_norm_layers(backbone_of(study)) is None:
        return next(iter(obstacles(network_of(study))), None)
    return BATCH_NORM if has_batch_norm(study) else None


def _said_norm_layers(kind: type[models.Backbone]) -> bool | None:
    """What a backbone of the package says of itself; None for anybody else's, derived from one of ours or not."""
    return kind.norm_layers if kind.__module__.startswith("polyclinic.") else None


def try_network(name: str, kind: type[models.Backbone], size: int, norm: str) -> None:
    """BadInput if a plug-in's network cannot be built, or gives a wrong shape: two images are sent through it."""
    where = f"'{name}' ({models.BACKBONES.origin(name)})"
    try:
        output = kind.without_weights(size, norm).eval()(torch.zeros(2, 1, size, size, device="meta"))
        shape = tuple(output.shape)
    except Exception as error:  # whatever a stranger's network does
        raise BadInput(f"model.backbone: {where} cannot take 1 x {size} x {size} images: {reason(error)}") from None
    wanted = (2, 2, size, size) if kind.dense else (2, 2)
    if shape != wanted:
        raise BadInput(
            f"model.backbone: {where} gives {shape} for 2 images and 2 outputs, and must give {wanted}; mend its last "
            "layer, or its `dense`"
        )


def try_private(study: Study) -> None:
    """BadInput if an importable network cannot be trained with gradients per image: nobody knows before it is tried."""
    kind = backbone_of(study)
    if not issubclass(kind, Imported):
        return
    from polyclinic.privacy.dp_sgd import try_gradients

    assert study.privacy is not None, "asked for private studies only"
    size = study.data.size
    images = torch.rand(2, channels_of(kind), size, size, generator=torch_rng(0, "trial"))
    network = kind.sample(size, study.model.norm)
    mixed = mixes_samples(network.eval(), torch.cat([images, 1 - images]))
    problem = "it mixes the images of a batch" if mixed else try_gradients(network, images, study.privacy.clipping)
    if problem:
        raise BadInput(
            f"privacy.on: {kind.name} cannot be trained with gradients per image ({problem[:120]}); choose another "
            f"network, such as {', '.join(models.BACKBONES.builtin)}"
        )
