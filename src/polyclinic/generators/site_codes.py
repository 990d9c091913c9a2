"""Codes of each site's images with their labels, and how parcels carry them (packed bits)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polyclinic.federation.ledger.code_packing import pack, unpack
from polyclinic.generators.base import CodedModel, count
from polyclinic.generators.replay_stream import FromCodes

#: tensors by kind of parcel and name
Groups = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class SiteCodes:
    """Codes of a site's images by level, int16 [N, h, w], their labels [N] and perhaps masks uint8 [N, H, W]."""

    codes: Mapping[str, Tensor]
    labels: Tensor
    masks: Tensor | None = None

    def __len__(self) -> int:
        return count(self.codes)


def to_groups(by_site: Mapping[str, SiteCodes], model: CodedModel) -> Groups:
    """Codes by site as tensors of the kinds codes, labels and masks; codes at ceil(log2 K) bits each."""
    sizes = model.codebook_sizes
    groups: Groups = {
        "codes": {
            f"{site}/{level}": pack(one.codes[level], sizes[level]) for site, one in by_site.items() for level in sizes
        },
        "labels": {site: one.labels for site, one in by_site.items()},
    }
    masks = {site: one.masks for site, one in by_site.items() if one.masks is not None}
    return groups | ({"masks": masks} if masks else {})


def from_groups(groups: Mapping[str, Mapping[str, Tensor]], model: CodedModel) -> dict[str, SiteCodes]:
    """What `to_groups` was given; BadInput where the bytes are not codes of this model."""
    grids = code_shapes(model)
    by_site = {}
    for site, labels in sorted(groups["labels"].items()):  # in memory and from a file alike
        codes = {
            level: unpack(groups["codes"][f"{site}/{level}"], size, (len(labels), *grids[level]))
            for level, size in model.codebook_sizes.items()
        }
        by_site[site] = SiteCodes(codes, labels, groups.get("masks", {}).get(site))
    return by_site


def code_shapes(model: CodedModel) -> dict[str, tuple[int, ...]]:
    """Rows and columns of codes by level."""
    blank = torch.zeros(1, model.channels, model.size, model.size, dtype=torch.uint8)
    return {level: tuple(codes.shape[1:]) for level, codes in model.encode(blank).items()}


def source_of(by_site: Mapping[str, SiteCodes], model: CodedModel) -> FromCodes:
    """The images of all sites' codes, as something that can be replayed."""
    every = list(by_site.values())
    masks = [one.masks for one in every if one.masks is not None]
    return FromCodes(
        model,
        {level: torch.cat([one.codes[level] for one in every]) for level in model.codebook_sizes},
        torch.cat([one.labels for one in every]),
        torch.cat(masks) if masks else None,
    )
