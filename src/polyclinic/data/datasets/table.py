"""Your own images listed in a CSV file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.labelled import LabelledSource
from polyclinic.data.listing import Listing
from polyclinic.data.names import safe_names
from polyclinic.data.reading import Reader, Slices, Window
from polyclinic.data.tables import Table, read_table, split_names
from polyclinic.errors import BadInput

OPTIONAL = ("label", "site", "split", "patient", "mask", "subgroup")


class Csv(LabelledSource):
    """Your own images, listed in a CSV with path, label and optional site, split, patient, mask, subgroup."""

    source: Literal["csv"] = "csv"
    image: str = Field("path", description="column with the path of the image, relative to the CSV")
    label: str = Field("label", description="column with the class, or with the value to predict")
    site: str = Field("site", description="column with the institution")
    split: str = Field("split", description="column with train, validation, test or nothing")
    patient: str = Field("patient", description="column with the patient, never put on both sides of a split")
    mask: str = Field("mask", description="column with the path of the mask; above zero is inside")
    subgroup: str = Field("subgroup", description="column with a finer label inside a class")
    window: Window | None = Field(None, description="centre and width of DICOM or NIfTI intensities")
    slices: Slices = Field("middle", description="slices of a volume: middle, all, or a list of numbers")

    tasks: ClassVar[tuple[str, ...]] = ("classification", "regression", "segmentation")
    layout: ClassVar[str] = """
        path,label,site,split,patient,mask
        scans/0001.png,benign,Graz,train,p01,masks/0001.png
        scans/0002.dcm,malignant,Wien,test,p02,masks/0002.png
    Only `path` is needed, and `label` unless there are masks; columns may have other names (settings).
    Paths are relative to the CSV. PNG, JPEG, TIFF, BMP, DICOM and NIfTI may be mixed."""

    def files(self) -> Iterable[Path]:
        table = read_table(self.path, self.image)
        names = [self.image, *([self.mask] if self.mask in table.columns else [])]
        return [self.path, *(self.path.parent / row[name] for row in table.rows for name in names)]

    def listing(self) -> Listing:
        table = self._chosen_rows()
        reader = Reader(self.window, self.slices)
        paths = [self.path.parent / row[self.image] for row in table.rows]
        items = [(row, frame) for row, path in enumerate(paths) for frame in reader.frames(path)]
        rows = np.array([row for row, _ in items])
        labels, classes = self._labels(table)
        columns = {name: self._column(table, name) for name in OPTIONAL}
        places = [f"{table.place(i)} ({table.rows[i][self.image]})" for i in range(len(table))]
        masks = columns.pop("mask")
        return Listing(
            picture=lambda i: reader.pixels(paths[items[i][0]], items[i][1]),
            name=lambda i: places[items[i][0]] + ("" if items[i][1] is None else f" slice {items[i][1]}"),
            labels=labels[rows],
            classes=classes,
            unit=self.unit,
            label_range=self.label_range,
            mask=None if masks is None else lambda i: reader.mask(self.path.parent / masks[items[i][0]], items[i][1]),
            patient=self._patients(columns["patient"], rows),
            site=_taken(columns["site"], rows, safe_names),
            split=_taken(columns["split"], rows, lambda values: split_names(values, places)),
            subgroup=_taken(columns["subgroup"], rows),
            ids=np.array([row[self.image] for row in table.rows])[rows],
        )

    def _chosen_rows(self) -> Table:
        table = read_table(self.path, self.image)
        wanted = [self.image] + [name for name in OPTIONAL if name in self.model_fields_set and getattr(self, name)]
        table.require(*(getattr(self, name) if name in OPTIONAL else name for name in wanted))
        if self.keep:
            table = table.where(self.kept({name: table.column(name) for name in table.columns}))
        self._refuse_gaps(table)
        return table

    def _refuse_gaps(self, table: Table) -> None:
        """Every empty cell where there must be a value, all in one message."""
        columns = (self.image, self.label, self.patient, self.mask, self.site)
        needed = [name for name in columns if name in table.columns]
        gaps = [
            f"row {line}: no {name}"
            for row, line in zip(table.rows, table.lines, strict=True)
            for name in needed
            if not row[name]
        ]
        if gaps:
            head = f"{self.path}: {len(gaps)} cells are empty; fill them or remove the rows:"
            raise BadInput("\n  ".join([head, *gaps[:200]]))

    def _column(self, table: Table, name: str) -> np.ndarray | None:
        column = getattr(self, name)
        return table.column(column) if column in table.columns else None

    def _labels(self, table: Table) -> tuple[np.ndarray, tuple[str, ...]]:
        values = self._column(table, "label")
        if values is None:
            if self.mask not in table.columns:
                raise BadInput(f"{self.path}: there is neither a column '{self.label}' nor '{self.mask}'; name one")
            return np.zeros(len(table), dtype=np.int64), ("image",)
        return self.targets(values, table.place)

    def _patients(self, patients: np.ndarray | None, rows: np.ndarray) -> np.ndarray | None:
        """Slices of one volume are one patient's even where no column says so."""
        if patients is None:
            return None if len(set(rows.tolist())) == len(rows) else rows
        return patients[rows]


def _taken(
    values: np.ndarray | None,
    rows: np.ndarray,
    change: Callable[[np.ndarray], np.ndarray] = lambda values: values,
) -> np.ndarray | None:
    """The changed value of each image's row, where there is such a column."""
    return None if values is None else change(values)[rows]
