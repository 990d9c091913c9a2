"""Reading the tables that come with images: CSV files whose rows can be named in a message."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polyclinic.errors import BadInput
from polyclinic.registry import notice_once

SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
    "testing": "test",
    "": "",
}


@dataclass(frozen=True)
class Table:
    """A CSV file: its rows by column name, and the line each stands in (the header is line 1)."""

    file: Path
    columns: tuple[str, ...]
    rows: list[dict[str, str]]
    lines: list[int]

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> np.ndarray:
        """One column as an array of strings, without blanks around them."""
        self.require(name)
        return np.array([row[name] for row in self.rows], dtype=str)

    def require(self, *names: str) -> None:
        """Says in one sentence which columns are missing and which there are."""
        if missing := self.missing(*names):
            raise BadInput(missing)

    def missing(self, *names: str) -> str:
        """The sentence of `require`; nothing where all columns are there."""
        absent = [f"'{name}'" for name in dict.fromkeys(names) if name not in self.columns]
        what = f"is no column {absent[0]}" if len(absent) == 1 else f"are no columns {', '.join(absent)}"
        return f"{self.file}: there {what}; it has {', '.join(self.columns)}" if absent else ""

    def place(self, i: int) -> str:
        """The name of row i in a message."""
        return f"{self.file.name} row {self.lines[i]}"

    def where(self, chosen: np.ndarray) -> "Table":
        """The rows at the given indices."""
        index = np.asarray(chosen, dtype=np.int64).tolist()
        return Table(self.file, self.columns, [self.rows[i] for i in index], [self.lines[i] for i in index])


def read_table(file: Path, *needed: str) -> Table:
    """A CSV file with a header, separated by comma, semicolon or tab."""
    if not file.is_file():
        raise BadInput(f"data.path: the table '{file}' is missing; `polyclinic data show` says where it belongs")
    content = file.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        try:
            text, how = content.decode("cp1252"), "Windows-1252"
        except UnicodeDecodeError:
            text, how = content.decode("latin-1"), "Latin-1"
        if "\0" not in text:
            notice_once(f"{file}: is no UTF-8, and was read as {how}; look whether its letters are right")
    if "\0" in text:
        raise BadInput(f"{file}: holds NUL characters, which no table has; save it again as CSV (UTF-8)")
    if not text.strip():
        raise BadInput(f"{file}: the table is empty; it needs a header")
    delimiter = max(",;\t", key=text.splitlines()[0].count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    rows, numbers = [], []
    try:
        columns = tuple((name or "").strip() for name in reader.fieldnames or ())
        reader.fieldnames = list(columns)
        for row in reader:
            rows.append({name: (row.get(name) or "").strip() for name in columns})
            numbers.append(reader.line_num)
    except csv.Error as error:
        raise BadInput(
            f"{file} row {reader.line_num + 1}: cannot be read ({error}); save it again as CSV (UTF-8)"
        ) from None
    table = Table(file, columns, rows, numbers)
    table.require(*needed)
    return table


def file_of(folder: Path, cell: str) -> Path:
    """The file that a cell names, from a folder; a path of Windows, with backslashes, where no file has that name."""
    file = folder / cell
    return folder / cell.replace("\\", "/") if "\\" in cell and not file.exists() else file


def split_names(values: np.ndarray, places: list[str]) -> np.ndarray:
    """Usual spellings ("val", "training") as the project's three words; others are named with their place."""
    words = [SPLIT_NAMES.get(str(value).strip().lower()) for value in values]
    if None in words:
        i = words.index(None)
        raise BadInput(f"{places[i]}: unknown split '{values[i]}'; use train, validation or test")
    return np.array(words, dtype="<U10")
