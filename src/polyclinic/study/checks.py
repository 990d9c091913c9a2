"""Combinations of settings that cannot work, each with the cure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polyclinic.errors import BadInput
from polyclinic.generators.base import SMALLEST_IMAGE
from polyclinic.generators.private_tuning import can_tune
from polyclinic.methods import METHODS
from polyclinic.methods.shared.generative_replay import GenerativeReplay
from polyclinic.models import BACKBONES, build, norm_names
from polyclinic.privacy import settings as private
from polyclinic.settings import nearest

if TYPE_CHECKING:
    from polyclinic.study.tables import Study


def check_task(study: Study) -> None:
    """BadInput if the data, the network or the method cannot do the study's task."""
    task, method = study.task.name, study.method
    if task not in study.data.tasks:
        can = ", ".join(study.data.tasks)
        raise BadInput(f"task.name: '{study.data.source}' has no labels for {task}; it is for {can}")
    if task not in method.traits.tasks:
        raise BadInput(f"task.name: method '{method.name}' is for {', '.join(method.traits.tasks)}, not {task}")
    if study.model.backbone not in BACKBONES:
        hint = nearest(study.model.backbone, list(BACKBONES))
        raise BadInput(
            f"model.backbone: no such choice: '{study.model.backbone}'{hint}; choose one of {', '.join(BACKBONES)}"
        )
    if BACKBONES[study.model.backbone].dense != study.task.dense:
        fitting = ", ".join(name for name, kind in BACKBONES.items() if kind.dense == study.task.dense)
        raise BadInput(f"model.backbone: '{study.model.backbone}' cannot do {task}; choose {fitting}")
    for site, backbone in study.model.backbones.items():
        if not method.traits.mixes_backbones:
            can = ", ".join(name for name, kind in METHODS.items() if kind.traits.mixes_backbones)
            raise BadInput(
                f"model.backbones: '{method.name}' needs the same network at every site; choose one of {can}"
            )
        if backbone not in BACKBONES or BACKBONES[backbone].dense != study.task.dense:
            fitting = ", ".join(name for name, kind in BACKBONES.items() if kind.dense == study.task.dense)
            raise BadInput(f"model.backbones: '{backbone}' of site '{site}' cannot do {task}; choose {fitting}")
    method.check_task(task)


def check_model(study: Study) -> None:
    """BadInput if the network lacks what the study wants of it."""
    model, method = study.model, study.method
    cuts = _cuts(model.backbone)
    if model.cut is not None and model.cut not in cuts:
        raise BadInput(f"model.cut: {model.backbone} has no cut '{model.cut}'; choose one of {', '.join(cuts)}")
    if model.batch_norm == "local" and method.traits.batch_norm == "average":
        raise BadInput(f"model.batch_norm: '{method.name}' cannot keep it local; set model.batch_norm = 'average'")
    if method.traits.batch_norm == "local" and not norm_names(
        build(model.backbone, channels=1, outputs=2, size=64, norm=model.norm)
    ):
        raise BadInput(
            f"method.name: {method.name} keeps batch-norm layers at the sites, and {model.backbone} with "
            f"model.norm = '{model.norm}' has none; choose a backbone with batch norm"
        )


def check_replay(study: Study) -> None:
    """BadInput if the study replays and cannot."""
    if study.replay is None:
        return
    if not isinstance(study.method, GenerativeReplay):
        can = ", ".join(name for name, method in METHODS.items() if method.traits.takes_replay)
        raise BadInput(f"replay: '{study.method.name}' cannot replay; take the table out, or choose one of {can}")
    if study.replay.codes != "prior" and not study.generator.has_codes:
        raise BadInput(
            f"generator.name: '{study.generator.name}' has no codes to replay; "
            "set replay.codes = 'prior' to replay its samples, or choose vqvae2"
        )
    if study.replay.codes == "prior" and study.task.dense:
        raise BadInput("replay.codes: samples of a prior have no masks; choose final-encoder for segmentation")
    if study.data.size < SMALLEST_IMAGE:
        raise BadInput(f"data.size: generators need images of {SMALLEST_IMAGE} px or more, not {study.data.size}")


def check_tuning(study: Study) -> None:
    """BadInput if the study wants a generator trained in phases that cannot be, or that nobody trains."""
    if study.method.needs_generator() and study.data.size < SMALLEST_IMAGE:
        raise BadInput(f"data.size: generators need images of {SMALLEST_IMAGE} px or more, not {study.data.size}")
    if study.tuning is None or not study.tuning.on:
        return
    if not study.method.needs_generator() or not study.method.traits.tunes_generator:
        raise BadInput(f"tuning: '{study.method.name}' trains no generator that way; take the table out")
    if not can_tune(study.generator):
        raise BadInput(f"tuning: '{study.generator.name}' is no GAN; set tuning.on = false, or choose a GAN")


def check_privacy(study: Study) -> None:
    """BadInput if the study wants differential privacy where it cannot be had."""
    if study.privacy is None:
        return
    parts = [*study.method.traits.private_parts]
    if study.replay is not None and study.replay.ratio > 0:
        parts += ["generator", "prior"] if study.replay.codes == "prior" else ["generator"]
    with torch.device("meta"):  # its layers are looked at, its weights are not needed
        network = build(study.model.backbone, channels=1, outputs=2, size=64, norm=study.model.norm)
    facts = private.Facts(
        study.method.name,
        parts,
        study.method.privacy_obstacle(),
        network,
        study.generator.dp_obstacle(),
    )
    private.check(study.privacy, facts)


def _cuts(backbone: str) -> tuple[str, ...]:
    return tuple(BACKBONES[backbone].stages)[:-1]
