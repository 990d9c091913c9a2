"""What each site contributes to a replay: the codes of its images with their labels, as parcels carry them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polyclinic.federation.leaving.code_packing import pack, unpack
from polyclinic.generators.base import CodedModel, count
from polyclinic.generators.replay_stream import FromCodes

#: tensors by kind of parcel and name
Groups = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Share:
    """Codes of a site's images by level, int16 [N, h, w], their labels [N] and perhaps masks uint8 [N, H, W]."""

    codes: Mapping[str, Tensor]
    labels: Tensor
    masks: Tensor | None = None

    def __len__(self) -> int:
        return count(self.codes)


def to_groups(shares: Mapping[str, Share], model: CodedModel) -> Groups:
    """Shares by site as tensors of the kinds codes, labels and masks; codes at ceil(log2 K) bits each."""
    sizes = model.codebook_sizes
    groups: Groups = {
        "codes": {
            f"{site}/{level}": pack(s.codes[level], sizes[level]) for site, s in shares.items() for level in sizes
        },
        "labels": {site: share.labels for site, share in shares.items()},
    }
    masks = {site: share.masks for site, share in shares.items() if share.masks is not None}
    return groups | ({"masks": masks} if masks else {})


def from_groups(groups: Mapping[str, Mapping[str, Tensor]], model: CodedModel) -> dict[str, Share]:
    """What `to_groups` was given; BadInput where the bytes are not codes of this model."""
    grids = code_shapes(model)
    shares = {}
    for site, labels in groups["labels"].items():
        codes = {
            level: unpack(groups["codes"][f"{site}/{level}"], size, (len(labels), *grids[level]))
            for level, size in model.codebook_sizes.items()
        }
        shares[site] = Share(codes, labels, groups.get("masks", {}).get(site))
    return shares


def code_shapes(model: CodedModel) -> dict[str, tuple[int, ...]]:
    """Rows and columns of codes by level."""
    blank = torch.zeros(1, model.channels, model.size, model.size, dtype=torch.uint8)
    return {level: tuple(codes.shape[1:]) for level, codes in model.encode(blank).items()}


def source_of(shares: Mapping[str, Share], model: CodedModel) -> FromCodes:
    """All shares together as something that can be replayed."""
    every = list(shares.values())
    masks = [share.masks for share in every if share.masks is not None]
    return FromCodes(
        model,
        {level: torch.cat([share.codes[level] for share in every]) for level in model.codebook_sizes},
        torch.cat([share.labels for share in every]),
        torch.cat(masks) if masks else None,
    )
