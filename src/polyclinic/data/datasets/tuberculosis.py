"""The Montgomery County and Shenzhen Hospital chest radiographs, two sites that FedER learns from."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.file_source import FileSource
from polyclinic.data.listing import Listing, listing_of_files
from polyclinic.errors import BadInput

SITES = {"Montgomery": ("MontgomerySet", "MCUCXR"), "Shenzhen": ("ChinaSet_AllFiles", "CHNCXR")}


class MontgomeryShenzhen(FileSource):
    """Chest radiographs from two hospitals, tuberculosis or not, one image per patient (FedER)."""

    source: Literal["montgomery-shenzhen"] = "montgomery-shenzhen"
    size: int = Field(256, ge=16, le=1024, description="side of the square images, in pixels")
    channels: Literal["auto", 1, 3] = Field(1, description="1 for grey, 3 for colour")

    where: ClassVar[str] = (
        "The U.S. National Library of Medicine, 'Tuberculosis chest X-ray image data sets': NLM-MontgomeryCXRSet "
        "(138 images) and NLM-ChinaCXRSet (662); free for research with citation of Jaeger et al. 2014."
    )
    layout: ClassVar[str] = """
        path/MontgomerySet/CXR_png/MCUCXR_0001_0.png, ...
        path/ChinaSet_AllFiles/CXR_png/CHNCXR_0001_0.png, ...
    The last digit is the label: 0 normal, 1 tuberculosis. One of the two folders is enough."""

    def listing(self) -> Listing:
        found = [
            (site, file)
            for site, (folder, prefix) in SITES.items()
            for file in sorted((self.location / folder / "CXR_png").glob(f"{prefix}_*.png"))
        ]
        if not found:
            raise BadInput(
                f"data.path: '{self.location}' has no MontgomerySet/CXR_png/MCUCXR_*.png and no "
                "ChinaSet_AllFiles/CXR_png/CHNCXR_*.png; see `polyclinic data show montgomery-shenzhen`"
            )
        files = [file for _, file in found]
        return listing_of_files(
            files,
            [file.relative_to(self.location).as_posix() for file in files],
            labels=np.array([_label(file.stem) for file in files], dtype=np.int64),
            classes=("normal", "tuberculosis"),
            site=np.array([site for site, _ in found]),
        )


def _label(stem: str) -> int:
    digit = stem.rsplit("_", 1)[-1]
    if digit not in ("0", "1"):
        raise BadInput(f"data.path: '{stem}.png' should end in _0 (normal) or _1 (tuberculosis)")
    return int(digit)
