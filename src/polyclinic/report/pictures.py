"""Images in a report: a few of each site, where the study's data are at hand, and pictures that commands drew."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pydantic import ValidationError

from polyclinic.data.datasets import SOURCES
from polyclinic.data.partitions import PARTITIONS
from polyclinic.data.parts import SiteData, open_site, prepare
from polyclinic.data.plots import mosaic
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.json_types import JsonMapping

#: a side of a shown image, in pixels, and how many a row has
SIDE, SHOWN = 96, 8
#: a drawn picture that is larger than this is not put into the page
LARGEST = 8 * 2**20


@dataclass(frozen=True)
class SiteImages:
    """Each site's images, or the sentence that says why there are none."""

    why_none: str = ""
    sites: Mapping[str, SiteData] = field(default_factory=dict)


def images_of(study: JsonMapping, digests: JsonMapping) -> SiteImages:
    """The images of a study, if they are those that the run was made with.

    Only sources and partitions of this package are opened, so that a study from somebody else runs none of its code.
    """
    data, sites = dict(study.get("data", {})), dict(study.get("sites", {}))
    source, partition = (
        SOURCES.builtin.get(str(data.get("source"))),
        PARTITIONS.builtin.get(str(sites.get("partition"))),
    )
    if data.get("source") == "at-sites":
        return SiteImages("The images are at their sites, and none is in this report.")
    if source is None or partition is None or study.get("plugins"):
        return SiteImages("No images are shown: the study's data need a plug-in, and a report runs no code of a study.")
    try:
        prepared = prepare(source.model_validate(data), partition.model_validate(sites))
        if prepared.info["digests"] != dict(digests):
            return SiteImages("No images are shown: the images here are not those that the run was made with.")
        return SiteImages(sites={name: open_site(prepared.folder, name) for name in prepared.names})
    except (BadInput, WorkFailed, ValidationError, OSError):
        return SiteImages("No images are shown: the study's images are not on this machine.")


def rows_png(rows: Sequence[np.ndarray], side: int = SIDE) -> bytes:
    """Rows of images uint8 [N, C, H, W] as one PNG; small ones are enlarged without smoothing."""
    scale = max(1, side // rows[0].shape[-1])
    large = [np.asarray(row).repeat(scale, axis=-2).repeat(scale, axis=-1) for row in rows]
    return png_of(mosaic(large))


def png_of(pixels: np.ndarray) -> bytes:
    """uint8 [H, W, 3] as a PNG."""
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG", optimize=True)
    return content.getvalue()


def drawn_picture(folder: Path, path: Any) -> bytes | None:
    """A PNG that lies in a run folder, decoded and written anew; None for anything else, and for a path outside it."""
    file = (folder / str(path)).resolve()
    if not file.is_relative_to(folder.resolve()) or not file.is_file() or file.stat().st_size > LARGEST:
        return None
    try:
        with Image.open(file, formats=["PNG"]) as picture:
            return png_of(np.asarray(picture.convert("RGB")))
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
