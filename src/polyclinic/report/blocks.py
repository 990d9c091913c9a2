"""Blocks of a report: sections of sentences, charts, tables and pictures, which know neither HTML nor PDF; names and
definitions of metrics and other terms, and numbers as they are written for a person."""

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, ClassVar

from polyclinic.palette import Palette

Cell = str | float | int | None


@dataclass(frozen=True)
class Text:
    """A paragraph in plain words; `kind` is "text", "note" for what limits a figure, or "code"."""

    form: ClassVar = "text"
    words: str
    kind: str = "text"


@dataclass(frozen=True)
class Table:
    """Rows of numbers and texts under named columns. A cell is a number, a text, or None (`Cell`);
    `shown` says how to write one."""

    form: ClassVar = "table"
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str = ""

    def csv(self, most: int | None = None) -> str:
        """As CSV, of `most` rows at most. A text that a spreadsheet would take for a formula gets a quote in front."""
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerows([harmless(cell) for cell in row] for row in [self.columns, *self.rows[:most]])
        return text.getvalue()

    def has_numbers(self, column: int, most: int) -> bool:
        """True where cells of a column are numbers, by its first `most` rows."""
        return any(is_number(row[column]) for row in self.rows[:most] if column < len(row))


def harmless(cell: Any) -> Any:
    """A cell of a CSV file; a text that a spreadsheet would take for a formula gets a quote in front."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell


@dataclass(frozen=True)
class Chart:
    """A drawing with the table behind it. `draw(axes, theme)` draws with matplotlib; `size` is in inches.

    With several `panels`, one below the other, `axes` is an array of them.
    """

    form: ClassVar = "chart"
    key: str
    title: str
    draw: Callable[[Any, Palette], None]
    table: Table
    note: str = ""
    size: tuple[float, float] = (6.4, 3.8)
    panels: int = 1


@dataclass(frozen=True)
class Picture:
    """A raster image, a PNG, with words below it."""

    form: ClassVar = "picture"
    key: str
    png: bytes
    words: str


Block = Text | Table | Chart | Picture


@dataclass(frozen=True)
class Section:
    """A part of a report under a title; `key` is its anchor."""

    key: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Report:
    """All of it: the summary first."""

    title: str
    subtitle: str
    summary: Sequence[str]
    sections: Sequence[Section]
    #: sentences that a run warned with, below the summary
    warnings: Sequence[str] = ()

    def charts(self) -> list[Chart]:
        return [block for section in self.sections for block in section.blocks if isinstance(block, Chart)]


def anchor(key: str) -> str:
    """A key as the id of an HTML element."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", key) or "section"


def is_number(cell: Any) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def shown(cell: Any) -> str:
    """A cell as it is written for a person."""
    if cell is None:
        return "–"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    return number(cell) if isinstance(cell, float) else str(cell)


def number(value: float) -> str:
    """A number with three digits behind the point where it is small, and fewer where it is large."""
    if value != value or value in (float("inf"), float("-inf")):
        return "–"
    if value and abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}" if abs(value) < 10_000 else f"{value:,.0f}"


# --- words and numbers ----------------------------------------------------------------------------------

METRICS = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "auc": "AUC",
    "loss": "loss",
    "brier": "Brier score",
    "calibration_error": "calibration error (ECE)",
    "mae": "mean absolute error",
    "rmse": "root mean square error",
    "bias": "bias",
    "dice": "Dice",
    "hausdorff95": "Hausdorff distance (95 %)",
    "average_surface_distance": "average surface distance",
}
#: metrics of which a lower value is better
LOWER = {"loss", "brier", "calibration_error", "mae", "rmse", "hausdorff95", "average_surface_distance"}
#: metrics in the unit of the label
IN_UNIT = {"mae", "rmse", "bias"}
IN_PIXELS = {"hausdorff95", "average_surface_distance"}

#: terms that are explained on hover and focus, longest first where one is in another
DEFINITIONS = {
    "balanced accuracy": "The mean over classes of the share of that class's images that the model gets right.",
    "AUC": "The probability that an ill patient's image gets a higher score than a healthy one's. 0.5 is chance.",
    "AP": "Average precision: the area under the precision-recall curve.",
    "Brier score": "The mean squared error of probabilities. 0 is perfect.",
    "calibration error": "How far stated probabilities lie from how often they come true, on average over bins.",
    "ECE": "Expected calibration error: how far stated probabilities lie from how often they come true, over 15 bins.",
    "temperature": "One number by which all outputs are divided so that probabilities fit the validation images.",
    "sensitivity": "The share of ill patients' images that the model calls ill.",
    "specificity": "The share of healthy patients' images that the model calls healthy.",
    "PPV": "Positive predictive value: the share of positive results that are right, at a given prevalence.",
    "NPV": "Negative predictive value: the share of negative results that are right, at a given prevalence.",
    "prevalence": "The share of all patients who have the disease.",
    "Dice": "Twice the overlap of predicted and true mask, divided by the sum of both areas. 1 is perfect.",
    "Hausdorff distance": "How far the outlines lie apart at most, without the worst 5 % of points.",
    "average surface distance": "The mean distance between the two outlines.",
    "KS": "Kolmogorov-Smirnov statistic of two sites' labels. 0: same distribution; 1: they do not overlap.",
    "Bland-Altman": "Differences of predicted and true values against their mean, with bias and limits of agreement.",
    "limits of agreement": "Between them lie 95 % of all differences, if differences are normal.",
    "bootstrap": "Patients are drawn again and again with replacement; the spread of the results is the interval.",
    "95 % interval": "Made so that 95 of 100 such intervals hold the true value.",
    "epsilon": "What differential privacy spends: the smaller, the less any one image can change what left.",
    "delta": "The small probability with which the promise of epsilon may fail.",
    "ledger": "A site's own record of everything that left it; each line is chained to the one before it.",
    "parcel": "One thing that left or reached a site, of a declared kind, such as weights or metrics.",
    "PSNR": "Likeness of two images in decibels: the higher, the more alike.",
    "membership inference": "An attack that tells whether a given image was among the training images.",
    "McNemar": "A test of whether two classifiers are right equally often on the same images.",
    "DeLong": "A test of whether two models have the same AUC on the same images.",
    "Holm": "A correction of p values for the number of tests.",
}


def name_of_images(data: object, source: str) -> str:
    """Name of a study's images in a title: the name of their file or folder, else of their source."""
    path = data.get("path") if isinstance(data, Mapping) else None
    return (PurePath(path).name if isinstance(path, str) else "") or source


def metric_name(name: str) -> str:
    """The name of a metric for people."""
    return METRICS.get(name, name.replace("_", " "))


def mean_of(name: str) -> str:
    """The mean of a metric over runs, in words: of the mean absolute error, no mean mean."""
    words = metric_name(name)
    return words if words.startswith("mean ") else f"mean {words}"


def with_unit(name: str, value: float, unit: str = "") -> str:
    """A metric's value, with the unit where it has one."""
    found = unit if name in IN_UNIT else "pixels" if name in IN_PIXELS else ""
    return f"{number(value)} {found}".rstrip()


def with_interval(name: str, entry: Mapping[str, float], unit: str = "") -> str:
    """`0.912 (95 % interval 0.87 to 0.94)`; a bootstrap without width says nothing about new images."""
    if entry["low"] == entry["high"]:
        return f"{with_unit(name, entry['value'], unit)} (too few images for an interval)"
    return f"{with_unit(name, entry['value'], unit)} (95 % interval {number(entry['low'])} to {number(entry['high'])})"


def listed(names: list[str], most: int = 8) -> str:
    """`a, b and c`; of many names the first few and how many more there are."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "none"


def counted(count: int, noun: str, plural: str = "") -> str:
    """`1 site`, `3 sites`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
