"""How a volume is prepared: turned to right, front and head, cut to what is not empty, resampled, normalised."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, field_validator

from polyclinic.data.volumes.reading import MOST_VOXELS
from polyclinic.extras import need
from polyclinic.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from polyclinic.data.volumes.volume import RawVolume

#: millimetres between prepared voxels
FINEST, COARSEST = 0.05, 100.0
#: names of what goes through the transforms
IMAGE, MASK = "image", "mask"


class Intensities(Settings):
    """Fixed intensities of one channel, as a computed tomograph has them."""

    low: float = Field(description="intensities below become this one")
    high: float = Field(description="intensities above become this one")
    mean: float = Field(0.0, description="what becomes 0")
    deviation: float = Field(1.0, gt=0, description="what becomes 1, above the mean")


class Prepared(NamedTuple):
    """image float16 [C, X, Y, Z], mask uint8 [X, Y, Z] or None, and millimetres between voxels."""

    image: np.ndarray
    mask: np.ndarray | None
    spacing: tuple[float, ...]


class Preparation(Settings):
    """All that a prepared case depends on besides its files; a model keeps it, to prepare new cases the same way."""

    spacing: tuple[float, float, float] | None = Field(
        None, description="millimetres between voxels to which all cases are resampled; if not given, as they are"
    )
    normalise: Literal["each case", "fixed", "none"] = Field(
        "each case",
        description="each case: mean 0 and deviation 1 of every channel where it is not 0, as for MRI; fixed: by "
        "`intensities`, as for CT; none: as the files have them",
    )
    intensities: tuple[Intensities, ...] = Field((), description="fixed: {low, high, mean, deviation} of each channel")

    @field_validator("spacing")
    @classmethod
    def _possible(cls, spacing: tuple[float, float, float] | None) -> tuple[float, float, float] | None:
        if spacing is not None and not all(FINEST <= side <= COARSEST for side in spacing):
            raise ValueError(f"must be three numbers of millimetres from {FINEST:g} to {COARSEST:g}")
        return spacing

    def transforms(self, *, mask: bool) -> Any:
        """MONAI's transforms of a dictionary; they can be undone (`Invertd`)."""
        need("monai", "data: volumes")
        from monai import transforms as t

        keys = (IMAGE, MASK) if mask else (IMAGE,)
        steps: list[Any] = [t.Orientationd(keys, axcodes="RAS", labels=None)]
        if self.normalise == "each case":
            steps.append(t.CropForegroundd(keys, source_key=IMAGE, select_fn=_not_zero, allow_smaller=True))
        if self.spacing is not None:
            steps.append(t.Spacingd(keys, pixdim=self.spacing, mode=("bilinear", "nearest")[: len(keys)]))
        return t.Compose([*steps, *self._normalising()])

    def _normalising(self) -> list[Any]:
        from monai import transforms as t

        if self.normalise == "each case":
            return [t.NormalizeIntensityd(IMAGE, nonzero=True, channel_wise=True)]
        if self.normalise == "none":
            return []
        columns = {
            name: [getattr(one, name) for one in self.intensities] for name in ("low", "high", "mean", "deviation")
        }
        clip = partial(_clipped, columns["low"], columns["high"])
        mean, deviation = (np.array(columns[name], np.float32) for name in ("mean", "deviation"))
        return [t.Lambdad(IMAGE, clip), t.NormalizeIntensityd(IMAGE, mean, deviation, channel_wise=True)]

    def prepare(self, raw: "RawVolume") -> Prepared:
        """A case as the network takes it; `raw` stays as it is."""
        return self.prepared_and_back(raw)[0]

    def prepared_and_back(self, raw: "RawVolume") -> "tuple[Prepared, Callable[[Tensor], Tensor]]":
        """A prepared case, and what brings float maps [K, X, Y, Z] of it to the case's own grid; 0 where it was cut."""
        import torch
        from monai.data import MetaTensor
        from monai.transforms.utils import allow_missing_keys_mode

        extent = float(np.prod(raw.image.shape[1:]) * np.prod(raw.spacing))
        if self.spacing is not None and (voxels := extent / float(np.prod(self.spacing))) > MOST_VOXELS:
            raise ValueError(f"would have {voxels:.2g} voxels at preparation.spacing; choose a coarser one")
        affine = torch.from_numpy(raw.affine)
        given = {IMAGE: MetaTensor(torch.from_numpy(raw.image.copy()), affine)}
        if raw.mask is not None:
            given[MASK] = MetaTensor(torch.from_numpy(raw.mask[None]), affine)
        transforms = self.transforms(mask=raw.mask is not None)
        found = transforms(given)
        with np.errstate(over="ignore"):
            image = found[IMAGE].numpy().astype(np.float16)
        if not np.isfinite(image).all():
            raise ValueError("has intensities above 65,504, the most that 16 bits hold; set preparation.normalise")
        mask = found[MASK].numpy()[0].astype(np.uint8) if raw.mask is not None else None
        spacing = tuple(np.linalg.norm(found[IMAGE].affine[:3, :3].numpy(), axis=0).tolist())

        def back(maps: "Tensor") -> "Tensor":
            with_past = MetaTensor(maps, found[IMAGE].affine, applied_operations=found[IMAGE].applied_operations)
            with allow_missing_keys_mode(transforms):
                undone: Tensor = transforms.inverse({IMAGE: with_past})[IMAGE].as_tensor()
            return undone

        return Prepared(image, mask, spacing), back


def _not_zero(image: Any) -> Any:
    return image != 0


def _clipped(low: list[float], high: list[float], image: Any) -> Any:
    """Each channel between its lowest and highest intensity."""
    return image.clone().clip_(*(image.new_tensor(some)[:, None, None, None] for some in (low, high)))
