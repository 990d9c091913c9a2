"""FELICIA's synthetic images as the coordinator reads them from the sites' replies, and joins them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Reply
from polyclinic.federation.federation import Federation
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.generators.gan.trainer import centred
from polyclinic.methods.shared.central_discriminator import ImagesOfSites


def join_images(federation: Federation, replies: list[Reply], *, per_class: bool) -> ImagesOfSites:
    """All sites' images, and the number of the site and, with `per_class`, the label of each."""
    device = federation.trainer.device
    images = [to_floats(images_of(reply)) for reply in replies]
    site = [torch.full((len(some),), federation.sites.index(r.site)) for r, some in zip(replies, images, strict=True)]
    classes = len(federation.trainer.target.classes)
    labels = torch.cat(
        [labels_of(reply, classes) if per_class else torch.zeros(len(images_of(reply))) for reply in replies]
    )
    turns = not per_class or bool((labels == torch.arange(len(labels)) % classes).all())
    return ImagesOfSites(torch.cat(images).to(device), torch.cat(site).to(device), labels.to(device), turns)


def images_of_others(replies: list[Reply]) -> dict[str, dict[str, Parcel]]:
    """For each site, the synthetic images that all the others share."""
    given = {reply.site: shared_images(reply) for reply in replies}
    others = {site: [tensors for name, tensors in given.items() if name != site] for site in given}
    joined = {
        site: {name: torch.cat([tensors[name] for tensors in sets]) for name in ("images", "labels")}
        for site, sets in others.items()
        if sets
    }
    return {
        site: {"synthetic_images": Parcel("synthetic-images", tensors, compressed=("images",))}
        for site, tensors in joined.items()
    }


def images_of(reply: Reply) -> Tensor:
    """The synthetic images that a site sent."""
    return reply.parcel("synthetic-images").tensors["images"]


def labels_of(reply: Reply, classes: int) -> Tensor:
    """The classes that a site says it made its images for."""
    labels = reply.parcel("synthetic-images").tensors.get("labels", torch.empty(0))
    whole = labels.shape == (len(images_of(reply)),) and labels.dtype == torch.long
    if not whole or bool(((labels < 0) | (labels >= classes)).any()):
        raise WorkFailed(f"site '{reply.site}': its synthetic images came without a class from 0 to {classes - 1} each")
    return labels


def shared_images(reply: Reply) -> Mapping[str, Tensor]:
    """The images and labels that a site shares; sites check what they get of them (`utility.received_part`)."""
    tensors = reply.parcel("synthetic-images").tensors
    images, labels = (tensors.get(name, torch.empty(0)) for name in ("images", "labels"))
    if images.dtype != torch.uint8 or images.dim() != 4 or labels.shape != images.shape[:1]:
        raise WorkFailed(f"site '{reply.site}': it shares no uint8 images with a label each")
    return tensors


def to_floats(images: Tensor) -> Tensor:
    """Images in [-1, 1], whichever way they travelled."""
    return centred(images) if images.dtype == torch.uint8 else images
