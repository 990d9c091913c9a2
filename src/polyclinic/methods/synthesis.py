"""A node's own generator and its buffer of synthetic images: what FedER and the baselines of its Table 2 share."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from polyclinic.data.parts import Part
from polyclinic.federation.parcel import Parcel
from polyclinic.federation.site import Site
from polyclinic.generators import GeneratorModel, private_tuning
from polyclinic.generators.sheet import contact_sheet
from polyclinic.tasks import Target

#: columns of the contact sheet
SHOWN = 12

Tensors = Mapping[str, Tensor]


def train_generator(site: Site) -> tuple[GeneratorModel, dict[str, float]]:
    """The study's generator, trained on the site's images: in two phases where the study has [tuning]."""
    part, rng = site.data.train, site.rng("generator")
    channels, size, _ = part.images.shape[1:]
    model = site.generator.build(
        channels=channels,
        size=size,
        target=site.bench.target,
        seed=site.seed,
        device=str(site.bench.device),
        precision=site.bench.precision,
    )
    images, labels = np.asarray(part.images), np.asarray(part.labels)
    if site.tuning is None:
        return model, {f"loss_{name}": value for name, value in model.fit(images, labels, rng).items()}
    return model, private_tuning.fit(model, images, labels, rng, site.tuning)


def draw_buffer(site: Site, model: GeneratorModel, count: int) -> dict[str, Tensor]:
    """`images` uint8 [N, C, H, W] and `labels` [N], drawn once; also the site's contact sheet."""
    labels = uniform_labels(count, site.data.train.labels, site.bench.target, site.rng("buffer labels"))
    buffer = {"images": model.sample(labels, site.rng("buffer")), "labels": labels}
    if count:
        _draw_sheet(site, buffer)
    return buffer


def uniform_labels(count: int, own: np.ndarray, target: Target, rng: torch.Generator) -> Tensor:
    """Labels drawn alike from the classes that the site has images of, or from the public range of values.

    Of a class that it has never seen a generator would make images of something else.
    """
    if target.classes:
        known = torch.from_numpy(np.unique(own).astype(np.int64))
        return known[torch.randint(len(known), (count,), generator=rng)]
    low, high = target.label_range or (0.0, 0.0)
    return low + (high - low) * torch.rand(count, generator=rng)


def parcel_of(buffer: Tensors) -> Parcel:
    """A buffer as it travels: images losslessly compressed, with the labels that were asked for."""
    return Parcel("synthetic-images", dict(buffer), compressed=("images",))


def own_parcel(site: Site) -> Parcel:
    """The site's own buffer as it travels. It is the same in every round, so it is compressed once."""
    if "buffer" not in site.cache:
        site.cache["buffer"] = parcel_of(site.state.group("buffer"))
    return site.cache["buffer"]


def as_part(buffer: Tensors) -> Part:
    """A buffer as something that a workbench can train on."""
    return Part(buffer["images"].numpy(), buffer["labels"].numpy())


def _draw_sheet(site: Site, buffer: Tensors) -> None:
    """Real images above synthetic ones of the same labels, in the site's own folder."""
    labels = buffer["labels"][:SHOWN]
    own = torch.from_numpy(np.array(site.data.train.labels))
    gaps = (own[:, None].double() - labels[None].double()).abs()
    nearest = [int(gaps[:, column].argsort(stable=True)[column]) for column in range(min(len(labels), len(own)))]
    real = torch.from_numpy(site.data.train.images[nearest].copy())
    captions = [f"{label:g}" for label in labels.tolist()]
    contact_sheet({"real": real, "synthetic": buffer["images"][:SHOWN]}, site.folder / "synthetic.png", captions)
