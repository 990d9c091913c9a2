"""What happens to an operation's parcels before the gate: differential privacy is checked, scores are made coarse, and
the patients behind them are counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from polyclinic.federation.host_spec import HostSpec
from polyclinic.federation.leaving.budget import SCORES, tells_something
from polyclinic.federation.leaving.cohort import (
    GENERATED,
    cohort,
    fewest_patients,
    images_in_generator_step,
    images_in_private_step,
    patients_in,
)
from polyclinic.federation.leaving.gate import GateRefused, GateRefusedData
from polyclinic.federation.leaving.parcel import Parcel
from polyclinic.federation.leaving.policy import Policy
from polyclinic.federation.operation import Operation
from polyclinic.federation.privacy_coverage import PUBLIC
from polyclinic.federation.site import Site
from polyclinic.federation.turn import Turn


def check_private(site: Site, operation: str, released: Iterable[Parcel]) -> None:
    """LookupError if an operation releases updates trained without differential privacy where the study wants it."""
    privacy = site.trainer.privacy if site.trainer else None
    if privacy is None:
        return
    if privacy.cover == "all":
        check_all_covered(operation, released, noised=privacy.score_noise is not None)
    if "classifier" not in privacy.on:
        return
    for parcel in released:
        if parcel.kind in ("weights", "gradients") and parcel.privacy is None:
            raise LookupError(
                f"'{operation}' trained {parcel.kind} without differential privacy, which privacy.on = 'classifier' "
                "asks for; the method must train with local_training.train, or take 'classifier' out of its traits"
            )


def check_all_covered(operation: str, released: Iterable[Parcel], *, noised: bool = False) -> None:
    """GateRefused if a parcel is not covered by differential privacy, or holds scores that are not `noised`, where the
    study wants all covered."""
    for parcel in released:
        if (parcel.kind == SCORES and not noised) or (parcel.privacy is None and tells_something(parcel)):
            raise GateRefused(f"'{operation}' releases {parcel.kind} that nothing covers, and privacy.cover is 'all'")


def without_loss(parcel: Parcel) -> Parcel:
    """The parcel without its training loss, an exact score of training images that no method needs."""
    told = {name: value for name, value in parcel.metadata.items() if name != "loss"}
    return parcel if len(told) == len(parcel.metadata) else replace(parcel, metadata=told)


def without_samples(
    policy: Policy, declared: Operation, parcels: tuple[Parcel, ...], weighting: str
) -> tuple[Parcel, ...]:
    """The parcels without the number of images, where the policy hides it; GateRefused where the method needs it."""
    if policy.samples == "tell" or not any("samples" in parcel.metadata for parcel in parcels):
        return parcels
    if weighting == "samples" or declared.summed != "mean":
        raise GateRefused(
            f"'{declared.address}' tells how many images it is of, and the site's policy hides that (samples); set "
            "federation.sum = 'secure', or method.weighting = 'uniform'"
        )
    return tuple(replace(p, metadata={n: v for n, v in p.metadata.items() if n != "samples"}) for p in parcels)


def coarse_scores(policy: Policy, turn: Turn, splits: tuple[str, ...], parcel: Parcel) -> Parcel:
    """Scores of these splits as a deployed site lets them out: none of training images, others as its policy says;
    anything else as it is."""
    if parcel.kind != SCORES:
        return parcel
    if "train" in splits:
        parcel = held_out_only(parcel, splits)
    if policy.scores == "fine" or not parcel.tensors:
        return parcel
    trainer, least = turn.site.trainer, max(policy.min_cohort, 1)
    return replace(parcel, tensors=trainer.task.coarse(dict(parcel.tensors), least, trainer.target))


def held_out_only(parcel: Parcel, splits: tuple[str, ...]) -> Parcel:
    """Scores without those of training images. Where an operation scores several splits, a score's name begins with its
    split, as `test_real` does; one whose name does not counts as one of training images."""
    known = tuple(f"{split}_" for split in splits if split != "train")
    tensors = {name: tensor for name, tensor in parcel.tensors.items() if name.startswith(known)}
    metadata = {name: value for name, value in parcel.metadata.items() if name in PUBLIC}
    return replace(parcel, tensors=tensors, metadata=metadata)


def count_patients(spec: HostSpec, turn: Turn, splits: tuple[str, ...], parcels: Sequence[Parcel]) -> int:
    """Patients behind what a site releases: those of its batches, or of the splits it scored."""
    counts = [cohort(turn.site.data, split) for split in splits]
    if splits == ("train",):
        counts += [patients_behind(spec, turn, parcel) for parcel in parcels if tells_something(parcel)]
    return min(counts)


def check_drawn_patients(policy: Policy, turn: Turn) -> None:
    """GateRefusedData if the batches that were drawn have enough images, and too few patients.

    How many images a study takes is public, and a refusal for it may be told. Whose images they were is not.
    """
    if not turn.used:
        return
    images = len(torch.cat([batch.flatten() for batch in turn.used]).unique())
    if images >= policy.min_cohort > patients_in(turn.site.data.train, turn.used):
        raise GateRefusedData(f"'{turn.call.operation}': {images} images were drawn, of fewer than min_cohort patients")


def check_classes(site: Site, which: str = "training") -> None:
    """GateRefusedData if a deployed site has training images of a class, and of fewer than min_cohort patients: called
    by operations that release something about each class by itself."""
    train = site.data.train
    if site.trainer.task.like != "classification":
        return
    labels = torch.from_numpy(np.array(train.labels))
    for label in labels.unique():
        if patients_in(train, [(labels == label).nonzero()]) < site.min_cohort:
            raise GateRefusedData(
                f"class {int(label)} has {which} images of fewer than min_cohort patients; leave the class out of the "
                "study, or add images"
            )


def check_more_images_than(width: int, site: Site, images: int) -> None:
    """GateRefusedData if sums of products of `width` features of so many images would give single images' features
    away, and the site's policy does not allow it."""
    if site.few_images == "refuse" and 0 < images <= width:
        raise GateRefusedData(
            f"sums of products of {width} features of {images} images give the features of single images away; take a "
            'smaller method.numbers, or write few_images = "allow" into policy.toml'
        )


def patients_behind(spec: HostSpec, turn: Turn, parcel: Parcel) -> int:
    """Patients whose training images a parcel is computed from.

    Which images a private step takes is itself a secret, so it counts by its size; but where the site has a budget
    of epsilon, that protects every patient. A generator counts by its mini-batch.
    """
    data, train = turn.site.data, turn.site.data.train
    if parcel.privacy is not None:
        if spec.policy.max_epsilon is not None:
            return cohort(data, "train")
        return fewest_patients(train, images_in_private_step(parcel.privacy, len(train)))
    if parcel.kind in GENERATED:
        return fewest_patients(train, images_in_generator_step(spec.generator))
    return patients_in(train, turn.used) if turn.used else cohort(data, "train")
