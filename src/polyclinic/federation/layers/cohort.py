"""Layers of the images behind an answer: which a site uses is noted, enough patients must be among them, they have
random shares in its gradients, and what left is kept with them for an audit."""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.federation.call import GateRefusedData
from polyclinic.federation.layers.interface import Layer
from polyclinic.federation.ledger.budget import tells_something
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.ledger.wire import ROUNDING
from polyclinic.federation.operation import Parcels, Transaction
from polyclinic.federation.site import HostSpec, Site
from polyclinic.json_types import JsonMapping
from polyclinic.randomness import torch_rng
from polyclinic.settings import Settings

#: kinds that a generator makes, or is
GENERATED = ("generator", "synthetic-images")


class DrawnPatients(Layer):
    """Batches that have enough images have enough patients.

    How many images a study takes is public, and a refusal for it may be told. Whose images they were is not.
    """

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        if transaction.used:
            images = len(torch.cat([batch.flatten() for batch in transaction.used]).unique())
            if images >= self.spec.policy.min_cohort > patients_in(transaction.site.data.train, transaction.used):
                raise GateRefusedData(
                    f"'{transaction.call.operation}': {images} images were drawn, of fewer than min_cohort patients"
                )
        return parcels


def cohort(data: SiteData, split: str) -> int:
    """Patients in a split of a site's images, or images where nobody knows whose they are."""
    part = getattr(data, split)
    return len(part) if part.cases is None else len(set(part.cases.tolist()))


def patients_in(images: ImageSet, batches: Sequence[Tensor]) -> int:
    """Patients whose images were in these batches of indices."""
    index = torch.cat([batch.flatten().cpu() for batch in batches]).unique()
    index = index[index < len(images)]  # what comes after a site's own images is not its patients'
    return len(index) if images.cases is None else len(set(images.cases[index.numpy()].tolist()))


def fewest_patients(images: ImageSet, batch: int) -> int:
    """The fewest patients that a batch of so many images can come from; tells nothing about which ones it has."""
    if images.cases is None:
        return min(batch, len(images))
    counts = np.sort(np.unique(images.cases, return_counts=True)[1])[::-1]
    return min(int(np.searchsorted(np.cumsum(counts), batch)) + 1, len(counts))


def images_in_private_step(record: JsonMapping, images: int) -> int:
    """How many of a site's images a step on record takes on average, in the smallest of its steps."""
    rates = [one["sampling_rate"] for one in record["mechanisms"] if one["steps"]] if "mechanisms" in record else [0.0]
    return round(min(rates, default=1.0) * images)


def images_in_generator_step(generator: Settings | None) -> int:
    """Real images in the smallest mini-batch that the study's generator learns from."""
    sizes = [getattr(generator, name, None) for name in ("batch_size", "prior_batch_size")]
    return min((size for size in sizes if size is not None), default=0)


def count_patients(spec: HostSpec, transaction: Transaction) -> int:
    """Patients behind what a site releases: those of its batches, or of the splits it scored."""
    counts = [cohort(transaction.site.data, split) for split in transaction.splits]
    if transaction.splits == ("train",):
        counts += [patients_behind(spec, transaction, parcel) for parcel in transaction.made if tells_something(parcel)]
    return min(counts)


def patients_behind(spec: HostSpec, transaction: Transaction, parcel: Parcel) -> int:
    """Patients whose training images a parcel is computed from.

    Which images a private step takes is itself a secret, so it counts by its size; but where the site has a budget
    of epsilon, that protects every patient. A generator counts by its mini-batch.
    """
    data, train = transaction.site.data, transaction.site.data.train
    if parcel.privacy is not None:
        if spec.policy.max_epsilon is not None:
            return cohort(data, "train")
        return fewest_patients(train, images_in_private_step(parcel.privacy, len(train)))
    if parcel.kind in GENERATED:
        return fewest_patients(train, images_in_generator_step(spec.study.generator))
    return patients_in(train, transaction.used) if transaction.used else cohort(data, "train")


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
    if site.policy.few_images == "refuse" and 0 < images <= width:
        raise GateRefusedData(
            f"sums of products of {width} features of {images} images give the features of single images away; take a "
            'smaller method.numbers, or write few_images = "allow" into policy.toml'
        )


class NotedBatches(Layer):
    """Indices of the images in every batch, for an archive and for the smallest cohort."""

    alone = True

    def is_needed(self) -> bool:
        return bool(self.spec.archive or self.spec.policy.min_cohort)

    @contextlib.contextmanager
    def around(self, transaction: Transaction) -> Iterator[None]:
        with transaction.site.trainer.note_batches() as transaction.used:
            yield


class RandomShares(Layer):
    """Random shares of images in gradients: others for every call, so that a run that is put back tells nothing more.
    Differential privacy bounds each image's share itself, and its proof wants no other image to change it."""

    alone = True

    def is_needed(self) -> bool:
        return self.spec.policy.shares == "random"

    def around(self, transaction: Transaction) -> contextlib.AbstractContextManager[None]:
        site = transaction.site
        if site.trainer.privacy is not None:
            return contextlib.nullcontext()
        return site.trainer.random_shares(
            torch_rng(*site.address("shares", site.round), site.secret, transaction.asked)
        )


class Archive(Layer):
    """Keeps what left, with what had come; nothing that was refused is kept."""

    alone = True

    def is_needed(self) -> bool:
        return self.spec.archive is not None

    def arriving(self, transaction: Transaction) -> None:
        assert self.spec.archive
        self.spec.archive.begins(transaction.site, transaction.call, transaction.received)

    def left(self, transaction: Transaction) -> None:
        assert self.spec.archive
        declared, wire = transaction.declared, self.spec.study.engine.wire
        kept = transaction.outgoing if wire in ROUNDING else transaction.made  # an attacker gets the rounded numbers
        left = transaction.outgoing if transaction.call.operation in self.host.sums.covered or wire == "delta" else None
        used, address = transaction.used, declared.address
        self.spec.archive.released(transaction.site, transaction.call, kept, used, address, left, transaction.asked)
