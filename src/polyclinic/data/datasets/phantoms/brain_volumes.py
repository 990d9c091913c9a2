"""Drawn brains as volumes: four channels, three nested regions, institutions that scan differently."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from polyclinic.data.volumes.brain import CHANNELS, REGIONS, draw_brain, scanner_of
from polyclinic.data.volumes.source import Case, VolumeSource
from polyclinic.data.volumes.volume import RawVolume


class BrainVolumes(VolumeSource):
    """Brains with a tumour in three nested regions, four channels, of four institutions. A vessel looks like it in
    every slice."""

    source: Literal["brain-volumes"] = "brain-volumes"
    samples: int = Field(60, ge=4, le=100_000, description="number of volumes")
    shape: tuple[int, int, int] = Field((48, 48, 40), description="voxels at usual spacing; FeTS has [240, 240, 155]")
    size: tuple[int, ...] = Field((32, 32, 32), description="sides of patches that a network learns from, in voxels")
    channels: tuple[str, ...] = Field(CHANNELS, description="names of the channels, in order")
    structures: dict[str, tuple[int, ...]] = Field(REGIONS, description="values of the mask by structure")

    def cases(self) -> Sequence[Case]:
        return [Case(f"brain-{number:04}", site=scanner_of(self.seed, number).name) for number in range(self.samples)]

    def read(self, number: int, case: Case) -> RawVolume:
        brain = draw_brain(self.seed, number, self.shape)
        chosen = [CHANNELS.index(name) for name in self.channels]
        affine = np.diag([*brain.spacing, 1.0])
        return RawVolume(brain.image[chosen].astype(np.float32), brain.mask, affine)

    def content(self) -> object:
        return self.seed
