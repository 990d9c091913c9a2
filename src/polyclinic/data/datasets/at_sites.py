"""The data source of a deployed study: images stay at the sites; the coordinator knows their shape and classes only."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from polyclinic.data.dataset import Dataset
from polyclinic.data.source import TASKS, Source
from polyclinic.errors import BadInput


class AtSites(Source):
    """Images that never leave their sites: each opens its own under a name that all have agreed on."""

    source: Literal["at-sites"] = "at-sites"
    dataset: str = Field("images", description="the name under which every site's own settings know its images")
    channels: Literal[1, 3] = Field(1, description="1 for grey, 3 for colour")
    classes: tuple[str, ...] = Field(("no", "yes"), description="the classes, in order; none where values are learnt")
    unit: str = Field("", description="the unit of the values to predict, such as months")
    label_range: tuple[float, float] | None = Field(None, description="smallest and largest value to predict")

    tasks: ClassVar[tuple[str, ...]] = TASKS

    def load(self) -> Dataset:
        raise BadInput(
            "data.source: 'at-sites' has no images here, each site has its own; `polyclinic deploy` runs such a study"
        )

    def info(self, sites: tuple[str, ...]) -> dict:
        """The facts that stand for `PreparedSites.info` where nobody but the sites can count."""
        return {
            "source": self.source,
            "channels": self.channels,
            "size": self.size,
            "classes": list(self.classes),
            "unit": self.unit,
            "label_range": list(self.label_range) if self.label_range else None,
            "counts": {site: {} for site in sites},
            "class_counts": {},
            "digests": {},
            "mean_ks": None,
        }
