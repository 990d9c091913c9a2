"""Volumes that never leave their sites."""

from typing import Any, Literal

from pydantic import Field

from polyclinic.data.source import AtSites
from polyclinic.data.volumes.source import OfVolumes


class VolumesAtSites(OfVolumes, AtSites):
    """Volumes that never leave their sites: each opens its own under a name that all have agreed on."""

    source: Literal["volumes-at-sites"] = "volumes-at-sites"  # type: ignore[assignment]
    dataset: str = Field("volumes", description="the name under which every site's own settings know its volumes")
    classes: tuple[str, ...] = Field((), max_length=0, description="none: volumes have structures")
    unit: str = Field("ml", description="the unit of a case's label, which is the volume of all its structures")

    def info(self, sites: tuple[str, ...]) -> dict[str, Any]:
        return {**super().info(sites), **self.more_facts()}
