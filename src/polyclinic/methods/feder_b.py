"""FedER-B (Pennisi et al. 2023, Fig. 5b): FedER-A whose models see synthetic images only, also at home."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from polyclinic.methods.feder_a import FedERA


class FedERB(FedERA):
    name: Literal["feder-b"] = "feder-b"  # type: ignore[assignment]
    buffer: int = Field(512, ge=1, description="synthetic images that a site trains on, and hands over")

    summary: ClassVar[str] = "FedER-A that trains on synthetic images only, also at home"
    trains_on_real_images: ClassVar[bool] = False
