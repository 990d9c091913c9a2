"""FedER-A (Pennisi et al. 2023, Fig. 5a): FedER that hands over buffers only; every site keeps a model of its own."""

from __future__ import annotations

from typing import ClassVar, Literal

from polyclinic.methods.feder import FedER


class FedERA(FedER):
    name: Literal["feder-a"] = "feder-a"  # type: ignore[assignment]

    summary: ClassVar[str] = "FedER that hands over buffers, but no models"
    hands_over_models: ClassVar[bool] = False
