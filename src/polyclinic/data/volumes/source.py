"""Sources of volumes: what every one has in common, and how its cases are prepared, one at a time, into the cache."""

import inspect
import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, field_validator, model_validator

from polyclinic.data.cache import PACKAGE, Progress, code_digest, entry_lock
from polyclinic.data.dataset import Dataset
from polyclinic.data.source import SPREAD, Source
from polyclinic.data.volumes.preparation import Preparation
from polyclinic.data.volumes.volume import RawVolume, Volume, rows_of
from polyclinic.errors import BadInput
from polyclinic.files import PARTIAL, atomic_file, atomic_write, cache_folder, digest_of, make_folder
from polyclinic.plugins import code_of
from polyclinic.registry import notice_once

#: settings that do not change how a case is prepared
AFTERWARDS = {*SPREAD, "seed", "size", "strict", "allow_outside", "origin"}
#: structures of a mask at most
MOST_STRUCTURES = 120
CUBIC_MM = 1000.0  #: in a millilitre


@dataclass(frozen=True)
class Case:
    """A case before anybody reads it: its name, patient, institution and split, "" where nobody says."""

    name: str
    patient: str = ""
    site: str = ""
    split: str = ""


class OfVolumes(Source):
    """What all sources of volumes say: patches, channels, structures, and how a case is prepared."""

    size: tuple[int, ...] = Field(  # type: ignore[assignment]  # of patches: what a network sees
        (64, 64, 64), description="sides of the patches that the network is trained with, in voxels"
    )
    channels: tuple[str, ...] = Field(("image",), min_length=1, description="names of the channels, in order")
    structures: dict[str, tuple[int, ...]] = Field(
        {}, description="values of the mask by structure: { core = [1, 4] }; structures may overlap (BraTS' regions)"
    )
    preparation: Preparation = Field(
        default_factory=Preparation, description="axes, spacing, intensities and size, a table of its own (volumes.md)"
    )

    tasks: ClassVar[tuple[str, ...]] = ("segmentation",)
    volumes: ClassVar[bool] = True

    @field_validator("size")
    @classmethod
    def _three_sides(cls, size: tuple[int, ...]) -> tuple[int, ...]:
        if len(size) != 3 or min(size) < 8 or max(size) > 512:
            raise ValueError("must be three numbers of voxels from 8 to 512, such as [64, 64, 48]")
        return size

    @field_validator("structures")
    @classmethod
    def _values(cls, structures: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        if len(structures) > MOST_STRUCTURES:
            raise ValueError(f"there are {len(structures)} structures, and at most {MOST_STRUCTURES} can be")
        for name, values in structures.items():
            if not values or not all(1 <= value <= 255 for value in values):
                raise ValueError(f"'{name}' needs values from 1 to 255; 0 is what is no structure")
        return structures

    @model_validator(mode="after")
    def _fixed_intensities(self) -> "OfVolumes":
        given, wanted = len(self.preparation.intensities), len(self.channels)
        if self.preparation.normalise == "fixed" and given != wanted:
            raise ValueError(f"preparation.intensities has {given} entries for {wanted} channels; give one for each")
        if self.acquisition:
            raise ValueError("acquisition changes cameras of images; leave it out for volumes")
        return self

    def more_facts(self) -> dict[str, Any]:
        """What `PreparedSites.info` says of volumes."""
        return {
            "channels": len(self.channels),
            "size": list(self.size),
            "structures": {name: list(values) for name, values in self.structures.items()},
            "has_masks": True,
        }


class VolumeSource(OfVolumes):
    """A source whose examples are volumes. A subclass says which cases there are, and reads one."""

    strict: bool = Field(False, description="stop at a case that cannot be read, instead of naming it and going on")

    @abstractmethod
    def cases(self) -> Sequence[Case]:
        """All cases, without reading one."""

    @abstractmethod
    def read(self, number: int, case: Case) -> RawVolume:
        """One case; ValueError says what is wrong with it, and the cure."""

    def content(self) -> object:
        """What the prepared cases depend on besides the settings, such as the files."""
        return ""

    def load(self) -> Dataset:
        return self.prepared()

    def prepared(self, cache: Path | None = None, progress: Progress | None = None) -> Dataset:
        """All cases, from the cache; those that are not there yet are prepared first, one after the other."""
        folder = cache_folder(cache) / "prepared" / self._entry()
        with entry_lock(folder):
            if not (folder / "facts.json").is_file():
                self._prepare(folder, progress)
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        self._tell(facts["problems"], len(facts["cases"]))
        return dataset_of(facts["cases"], folder)

    def _entry(self) -> str:
        settings = self.model_dump(mode="json", exclude=AFTERWARDS)
        code = [Path(inspect.getfile(kind)) for kind in type(self).__mro__ if kind.__module__.startswith("polyclinic.")]
        code += [*(PACKAGE / "volumes").glob("*.py"), PACKAGE / "reading.py"]
        made_of = {"settings": settings, "content": self.content(), "code": code_digest(set(code))}
        foreign = code_of(type(self))
        return digest_of(made_of | ({"plugins": foreign} if foreign else {}))

    def _prepare(self, folder: Path, progress: Progress | None) -> None:
        """Write the cases beside `folder`, after those of an attempt that was stopped; it appears at the end."""
        scratch, cases = folder.with_name(folder.name + PARTIAL), self.cases()
        make_folder(scratch)
        rows, problems = [], []
        for number, case in enumerate(cases):
            try:
                rows.append(self._prepared_case(scratch, number, case))
            except (ValueError, OSError, RuntimeError, MemoryError) as error:
                problems.append(f"{case.name}: {' '.join(str(error).split())[:300]}")
            if progress:
                progress("preparing volumes", number + 1, len(cases))
        self._tell(problems, len(rows))
        facts = {"cases": rows, "problems": problems}
        atomic_write(scratch / "facts.json", json.dumps(facts, indent=1))
        scratch.rename(folder)

    def _prepared_case(self, folder: Path, number: int, case: Case) -> dict[str, Any]:
        """The facts of a case, whose arrays lie in `folder` then."""
        known = folder / f"{number}.json"
        if known.is_file():
            found: dict[str, Any] = json.loads(known.read_text(encoding="utf-8"))
            return found
        raw = self.read(number, case)
        if raw.mask is None and self.structures:
            raise ValueError("has no mask; add it, or leave the case out")
        prepared = self.preparation.prepare(raw)
        for name, array in (("image", prepared.image), ("mask", prepared.mask)):
            if array is not None:
                with atomic_file(folder / f"{number}.{name}.npy") as partial, partial.open("wb") as file:
                    np.save(file, array, allow_pickle=False)
        facts = self._facts_of(case, raw, number) | {
            "prepared_shape": list(prepared.image.shape[1:]),
            "prepared_spacing": list(prepared.spacing),
        }
        atomic_write(known, json.dumps(facts))
        return facts

    def _facts_of(self, case: Case, raw: RawVolume, number: int) -> dict[str, Any]:
        values = [v for s in self.structures.values() for v in s]
        inside = 0 if raw.mask is None else int(np.isin(raw.mask, values).sum())
        return {
            "number": number,
            "name": case.name,
            "patient": case.patient or case.name,
            "site": case.site,
            "split": case.split,
            "origin": raw.origin(),
            "affine": raw.affine.tolist(),
            "millilitres": inside * float(np.prod(raw.spacing)) / CUBIC_MM,
            "has_mask": raw.mask is not None,
        }

    def _tell(self, problems: Sequence[str], good: int) -> None:
        """Name what was left out; BadInput where the study wants to stop at it, or nothing is left."""
        lines = "\n  ".join(problems)
        if problems and (self.strict or not good):
            raise BadInput(f"data: {len(problems)} cases cannot be used; mend or remove them:\n  {lines}")
        if not good:
            raise BadInput("data.path: no volumes found; `polyclinic data show volumes` says how they must lie")
        if problems:
            notice_once(f"data: {len(problems)} cases are left out (data.strict = true stops at them):\n  {lines}")


def dataset_of(rows: Sequence[dict[str, Any]], folder: Path) -> Dataset:
    """Prepared cases as a dataset: `images` are `Volume`s, a label is how many millilitres all structures have."""

    def column(name: str) -> np.ndarray:
        return np.array([row[name] for row in rows])

    def volume(row: dict[str, Any]) -> Volume:
        image, mask = (folder / f"{row['number']}.{name}.npy" for name in ("image", "mask"))
        return Volume(image, mask if row["has_mask"] else None, tuple(row["prepared_spacing"]), row["origin"])

    sites, splits = column("site"), column("split")
    return Dataset(
        images=rows_of([volume(row) for row in rows]),
        labels=column("millilitres").astype(np.float32),
        unit="ml",
        patient=column("patient"),
        site=sites if (sites != "").any() else None,
        split=splits if (splits != "").any() else None,
        ids=column("name"),
    )
