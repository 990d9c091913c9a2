"""Your own images listed in a CSV file."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.allowed_paths import safe_names
from polyclinic.data.doubles import two_labels
from polyclinic.data.listing import Listing
from polyclinic.data.reading import Reader, Slices, Window
from polyclinic.data.source import LabelledSource
from polyclinic.data.tables import Table, file_of, read_table, split_names
from polyclinic.errors import BadInput

MOST_NAMED = 200  #: faults of one kind in a message
OPTIONAL = ("label", "site", "split", "patient", "mask", "subgroup")


class Csv(LabelledSource):
    """Your own images, listed in a CSV with path, label and optional site, split, patient, mask, subgroup."""

    source: Literal["csv"] = "csv"
    image: str = Field("path", description="column with the path of the image, relative to the CSV")
    label: str | None = Field(None, description="column with the class or the value to predict; else label if there")
    site: str | None = Field(None, description="column with the institution; else site if there, '' for none")
    split: str | None = Field(None, description="train, validation, test or nothing; else split if there, '' for none")
    patient: str | None = Field(
        None, description="column with the patient, never on both sides of a split; else patient if there, '' for none"
    )
    mask: str | None = Field(None, description="the mask's path, above 0 is inside; else mask if there, '' for none")
    subgroup: str | None = Field(None, description="column with a finer label inside a class; else subgroup if there")
    window: Window | None = Field(None, description="centre and width of DICOM or NIfTI intensities")
    slices: Slices = Field("middle", description="slices of a volume: middle, all, or a list of numbers")

    tasks: ClassVar[tuple[str, ...]] = ("classification", "regression", "segmentation")
    outside_files: ClassVar[bool] = True
    cure: ClassVar[str] = "remove these rows, or let polyclinic study new --for leave them out"
    layout: ClassVar[str] = """
        path,label,site,split,patient,mask
        scans/0001.png,benign,Graz,train,p01,masks/0001.png
        scans/0002.dcm,malignant,Wien,test,p02,masks/0002.png
    Only `path` is needed, and `label` unless there are masks; columns may have other names (settings).
    Paths are relative to the CSV. PNG, JPEG, TIFF, BMP, DICOM and NIfTI may be mixed."""

    def files(self) -> Iterable[str | Path]:
        table = self._read()
        names = [name for name in (self.image, self._name(table, "mask")) if name]
        return [self.location, *(file_of(self.location.parent, row[name]) for row in table.rows for name in names)]

    def listing(self) -> Listing:
        table = self._chosen_rows()
        reader = Reader(self.window, self.slices, self.max_pixels)
        folder = self.location.parent
        paths = [file_of(folder, row[self.image]) for row in table.rows]
        items = [(row, frame) for row, path in enumerate(paths) for frame in reader.frames(path)]
        rows = np.array([row for row, _ in items])
        labels, classes = self._labels(table)
        columns = {name: self._column(table, name) for name in OPTIONAL}
        places = [f"{table.place(i)} ({table.rows[i][self.image]})" for i in range(len(table))]
        masks = columns.pop("mask")
        return Listing(
            picture=lambda i: reader.pixels(paths[items[i][0]], items[i][1]),
            spacing=lambda i: reader.spacing(paths[items[i][0]]),
            name=lambda i: places[items[i][0]] + ("" if items[i][1] is None else f" slice {items[i][1]}"),
            labels=labels[rows],
            classes=classes,
            unit=self.unit,
            label_range=self.label_range,
            mask=None if masks is None else lambda i: reader.mask(file_of(folder, masks[items[i][0]]), items[i][1]),
            patient=self._patients(columns["patient"], rows, paths),
            site=_taken(columns["site"], rows, safe_names),
            split=_taken(columns["split"], rows, lambda values: split_names(values, places)),
            subgroup=_taken(columns["subgroup"], rows),
            ids=np.array([row[self.image] for row in table.rows])[rows],
            columns=self.more_columns([table.column(name) for name in self.columns], rows),
            column_names=self.columns,
        )

    def _chosen_rows(self) -> Table:
        table = self._read()
        if self.keep:
            table = table.where(self.kept({name: table.column(name) for name in table.columns}))
        if gaps := self._gaps(table):
            raise BadInput("\n".join(filter(None, [gaps, self._absent(table)])))
        return table

    def _read(self) -> Table:
        """The table; where it lacks columns that settings name, one message says so, and names the empty cells."""
        table = read_table(self.location)
        wanted = [self.image, *(name for name in (getattr(self, field) for field in OPTIONAL) if name), *self.columns]
        wanted += self.several if isinstance(self.several, tuple) else ()
        if missing := table.missing(*wanted):
            others = [] if self.keep else [self._gaps(table), self._absent(table)]
            raise BadInput("\n".join(filter(None, [missing, *others])))
        return table

    def _gaps(self, table: Table) -> str:
        """Every empty cell where there must be a value, all in one message; nothing where there is none."""
        names = [self.image, *(self._name(table, field) for field in ("label", "patient", "mask", "site"))]
        gaps = [f"row {line}: no {name}" for line, name, cell in _cells(table, names) if not cell]
        return self._listed(gaps, "cell", "empty; fill them or remove the rows")

    def _absent(self, table: Table) -> str:
        """The files that are not there, in one message: told beside other problems, and not only after them."""
        cells, folder = _cells(table, [self.image, self._name(table, "mask")]), self.location.parent
        absent = [f"row {line}: {cell}" for line, _, cell in cells if cell and not file_of(folder, cell).exists()]
        return self._listed(absent, "file", "not there; correct the paths or remove the rows")

    def _listed(self, faults: Sequence[str], what: str, cure: str) -> str:
        are = f"{what}s are" if len(faults) > 1 else f"{what} is"
        return "\n  ".join([f"{self.location}: {len(faults)} {are} {cure}:", *faults[:MOST_NAMED]]) if faults else ""

    def _column(self, table: Table, name: str) -> np.ndarray | None:
        column = self._name(table, name)
        return table.column(column) if column else None

    def _name(self, table: Table, field: str) -> str:
        """The column that a setting names; else the one called like the setting if it is there; '' for none."""
        chosen = getattr(self, field)
        return chosen if chosen is not None else field if field in table.columns else ""

    def _labels(self, table: Table) -> tuple[np.ndarray, tuple[str, ...]]:
        columns = self.several if isinstance(self.several, tuple) else ()
        values = np.stack([table.column(name) for name in columns], 1) if columns else self._column(table, "label")
        if values is None:
            if not self._name(table, "mask"):
                raise BadInput(f"{self.location}: there is neither a column 'label' nor 'mask'; set data.label to one")
            return np.zeros(len(table), dtype=np.int64), ("image",)
        files = [row[self.image] for row in table.rows]
        if self.label_range is None and not columns and (rows := two_labels(files, values.tolist())):
            first, second = rows
            raise BadInput(
                f"{table.place(first)} and row {table.lines[second]}: '{files[first]}' has two labels, "
                f"'{values[first]}' and '{values[second]}'; remove one of the rows"
            )
        return self.targets(values, table.place)

    def _patients(self, patients: np.ndarray | None, rows: np.ndarray, paths: list[Path]) -> np.ndarray | None:
        """Slices of one volume, and rows of one image, are one patient's even where no column says so."""
        if patients is None:
            first = {path: row for row, path in reversed([*enumerate(paths)])}
            files = np.array([first[paths[row]] for row in rows.tolist()])
            return None if len(set(files.tolist())) == len(rows) else files
        return patients[rows]


def _cells(table: Table, names: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Line, column and content of the cells of those of these columns that there are, row by row."""
    known = [name for name in names if name in table.columns]
    return ((line, name, row[name]) for row, line in zip(table.rows, table.lines, strict=True) for name in known)


def _taken(
    values: np.ndarray | None, rows: np.ndarray, change: Callable[[np.ndarray], np.ndarray] = lambda values: values
) -> np.ndarray | None:
    """The changed value of each image's row, where there is such a column."""
    return None if values is None else change(values)[rows]
