"""Volumes of your own in a folder, and those of the BraTS and FeTS challenges."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from polyclinic.data.allowed_paths import safe_names
from polyclinic.data.source import Located
from polyclinic.data.tables import SPLIT_NAMES, read_table
from polyclinic.data.volumes.finding import find_cases
from polyclinic.data.volumes.reading import CaseFiles, read_case
from polyclinic.data.volumes.source import Case, VolumeSource
from polyclinic.data.volumes.volume import RawVolume
from polyclinic.errors import BadInput

#: what a table may call its columns, in the letters of lower case
COLUMNS = {
    "case": ("case", "subject_id", "subject", "id"),
    "site": ("site", "partition_id", "institution", "hospital"),
    "patient": ("patient", "patient_id"),
    "split": ("split",),
}


class VolumeFolder(VolumeSource, Located):
    """Your own volumes: NIfTI, archives or DICOM series, a file or folder for each channel of a case, and masks."""

    source: Literal["volumes", "fets"] = "volumes"
    table: Path | None = Field(None, description="CSV of cases: case, any of site, patient, split; FeTS' partitioning")
    patient: str = Field("", description="regular expression that finds the patient in a case's name; else each is one")

    outside_files: ClassVar[bool] = True
    phantom: ClassVar[str] = "brain-volumes"
    #: what a data set calls channels
    other_names: ClassVar[Mapping[str, str]] = {}
    #: a table that is taken where it lies at `path`
    usual_table: ClassVar[str] = ""
    layout: ClassVar[str] = """
        path/CASE/CASE_flair.nii.gz, path/CASE/CASE_t1.nii.gz, path/CASE/CASE_seg.nii.gz
    or  path/HOSPITAL/CASE/flair.nii.gz, path/HOSPITAL/CASE/mask.nii.gz
    or, as nnU-Net has them,
        path/imagesTr/CASE_0000.nii.gz, path/labelsTr/CASE.nii.gz
    or archives of image [C, X, Y, Z], mask [X, Y, Z], and spacing [3] or affine [4, 4]
        path/CASE.npz
    A folder of DICOM slices stands for a file. The last word of a name is a channel of data.channels, in any case of
    letters, or seg, mask or label."""

    @cached_property
    def _files(self) -> Mapping[tuple[str, str], CaseFiles]:
        self.refuse_missing_path()
        found = find_cases(self.location, self.channels, self.other_names)
        self.refuse_files_outside([file for case in found.values() for file in case.files])
        return found

    def files(self) -> Iterable[str | Path]:
        table = self._table_at()
        return [*super().files(), *([table] if table else [])]

    def cases(self) -> Sequence[Case]:
        rows = self._rows()
        if missing := [name for _, name in self._files if rows is not None and name not in rows]:
            raise BadInput(f"{self._table_at()}: there is no row for case '{missing[0]}'; add it")
        known = [(rows or {}).get(name, {}) for _, name in self._files]
        sites = [row.get("site", site) for row, (site, _) in zip(known, self._files, strict=True)]
        named = safe_names(sites) if all(sites) else [""] * len(sites)
        return [
            Case(name, row.get("patient") or self._patient(name), str(site), row.get("split", ""))
            for row, site, (_, name) in zip(known, named, self._files, strict=True)
        ]

    def read(self, number: int, case: Case) -> RawVolume:
        return read_case(list(self._files.values())[number], self.channels, self.structures)

    def content(self) -> object:
        return self.fingerprint()

    def _patient(self, name: str) -> str:
        try:
            found = re.search(self.patient, name) if self.patient else None
        except re.error as error:
            raise BadInput(f"data.patient: '{self.patient}' is not a regular expression ({error})") from None
        if self.patient and not found:
            raise BadInput(f"data.patient: '{self.patient}' finds nothing in the name of case '{name}'; correct it")
        return name if found is None else found[found.re.groups and 1]

    def _table_at(self) -> Path | None:
        usual = self.location / self.usual_table
        return self.table or (usual if self.usual_table and usual.is_file() else None)

    def _rows(self) -> dict[str, dict[str, str]] | None:
        """What the table says of each case."""
        if (file := self._table_at()) is None:
            return None
        table = read_table(file)
        columns = table.columns
        named = {what: next((n for n in columns if n.lower() in known), None) for what, known in COLUMNS.items()}
        if named["case"] is None:
            raise BadInput(f"{file}: has no column 'case'; name the column of the cases so")
        rows = [{what: row[name] for what, name in named.items() if name} for row in table.rows]
        for row in rows:
            if "split" in row and row["split"].lower() not in SPLIT_NAMES:
                raise BadInput(f"{file}: '{row['split']}' of case '{row['case']}' is no split; write train or test")
        return {row["case"]: row | {"split": SPLIT_NAMES.get(row.get("split", "").lower(), "")} for row in rows}


class Fets(VolumeFolder):
    """Brain tumours of the BraTS and FeTS challenges: four channels, three nested regions, FeTS' institutions."""

    source: Literal["fets"] = "fets"
    channels: tuple[str, ...] = Field(("t1", "t1ce", "t2", "flair"), description="names of the channels, in order")
    structures: dict[str, tuple[int, ...]] = Field(
        {"whole": (1, 2, 3, 4), "core": (1, 3, 4), "enhancing": (3, 4)},
        description="values of the mask by structure; 4 was the enhancing tumour until 2021, 3 is since 2023",
    )
    size: tuple[int, ...] = Field((128, 128, 128), description="sides of the patches of the network, in voxels")

    usual_table: ClassVar[str] = "partitioning_1.csv"
    other_names: ClassVar[Mapping[str, str]] = {"t1n": "t1", "t1c": "t1ce", "t2w": "t2", "t2f": "flair"}
    where: ClassVar[str] = (
        "The FeTS and BraTS challenges (synapse.org), on registration; for research, with citation of their papers."
    )
    layout: ClassVar[str] = """
        path/FeTS2022_00000/FeTS2022_00000_{t1,t1ce,t2,flair,seg}.nii.gz
        path/partitioning_1.csv     the institutions: Partition_ID, Subject_ID (another one: data.table)
    or  path/BraTS-GLI-00000-000/BraTS-GLI-00000-000-{t1n,t1c,t2w,t2f,seg}.nii.gz
    For patients with several dates: patient = "^(BraTS-GLI-\\\\d+)"."""
