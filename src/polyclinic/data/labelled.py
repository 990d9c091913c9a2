"""Label settings shared by the sources of a user's own images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field, model_validator

from polyclinic.data.file_source import FileSource
from polyclinic.data.labels import Value, classes_of, kept
from polyclinic.data.survey_labels import to_number
from polyclinic.errors import BadInput

NAMED_AT_MOST = 5  #: labels that cannot be used
REMOVE = "remove these images"


class LabelledSource(FileSource):
    """A source whose labels are classes unless `label_range` says that they are values."""

    label_range: tuple[float, float] | None = Field(
        None, description="lowest and highest possible value to predict; labels are then numbers, not classes"
    )
    unit: str = Field("", description="unit of a value to predict, e.g. 'months'")
    keep: dict[str, tuple[Value, ...]] | None = Field(
        None, description="values of the images to keep, by column or array: { labels = [0, 2, 3, 4] }"
    )
    merge: dict[str, tuple[Value, ...]] | None = Field(
        None, description="labels that become one class, by its name: { diseased = [2, 3, 4] }"
    )
    columns: tuple[str, ...] = Field(
        (), description="further columns or arrays that the run keeps of each image, for results by sub-group: ['sex']"
    )
    rename: dict[str, str] | None = Field(None, description='new names of labels: { "0" = "healthy" }')

    per_class: int | None = Field(None, ge=1, description="so many images of each class, drawn by data.seed")

    tasks: ClassVar[tuple[str, ...]] = ("classification", "regression", "segmentation")
    #: what to do about images whose label is no value
    cure: ClassVar[str] = REMOVE

    @model_validator(mode="after")
    def _value_or_class(self) -> LabelledSource:
        if self.unit and self.label_range is None:
            raise ValueError("unit needs label_range, the lowest and highest possible value")
        if self.label_range is not None and not self.label_range[0] < self.label_range[1]:
            raise ValueError("label_range must be the lowest and then the highest possible value")
        if self.label_range is not None and (self.merge or self.rename or self.per_class):
            raise ValueError("merge, rename and per_class are for classes; drop them or label_range")
        return self

    def more_columns(self, values: Sequence[np.ndarray], rows: np.ndarray) -> np.ndarray | None:
        """The chosen rows of the columns that `columns` names, str [N, K]; None where it names none."""
        return np.stack([np.asarray(column)[rows].astype(str) for column in values], axis=1) if values else None

    def kept(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """Indices of the images that `keep` leaves."""
        return kept(columns, self.keep or {})

    def targets(
        self, values: np.ndarray, place: Callable[[int], str], names: Sequence[str] | np.ndarray | None = None
    ) -> tuple[np.ndarray, tuple[str, ...]]:
        """Class indices and names of the classes; or values and nothing."""
        if self.label_range is None:
            refuse_no_label(values, place, self.cure)
            return classes_of(values, names, self.merge, self.rename)
        return numbers(values, place, self.label_range, self.cure), ()


def refuse_no_label(values: np.ndarray, place: Callable[[int], str], cure: str) -> None:
    """BadInput for labels that are NaN, or the text that NaN becomes in a table: no class."""
    none = [i for i, value in enumerate(values.tolist()) if str(value).strip().lower() == "nan"]
    if none:
        raise BadInput(_named([f"{place(i)}: the label is NaN, which is no class" for i in none], cure))


def numbers(
    values: np.ndarray, place: Callable[[int], str], bounds: tuple[float, float], cure: str = REMOVE
) -> np.ndarray:
    """float32 [N] within the bounds; labels that are not are named by their places, with the cure."""
    found = [to_number(value) for value in values.tolist()]
    none = [f"{place(i)}: the label '{values[i]}' is not a number" for i, value in enumerate(found) if value is None]
    if none:
        raise BadInput(_named(none, cure))
    result = np.array(found, dtype=np.float32)
    outside = np.flatnonzero((result < bounds[0]) | (result > bounds[1])).tolist()
    words = [f"{place(i)}: the label {values[i]} is outside data.label_range {list(bounds)}" for i in outside]
    if words:
        raise BadInput(_named(words, f"widen it, or {cure}"))
    return result


def _named(problems: Sequence[str], cure: str) -> str:
    """The first few of several problems, how many there are, and the cure."""
    more = len(problems) - NAMED_AT_MOST
    lines = [
        *problems[:NAMED_AT_MOST],
        *([f"and {more} more; {len(problems)} of this kind in all"] if more > 0 else []),
    ]
    return "\n  ".join([*lines, cure]) if len(problems) > 1 else f"{problems[0]}; {cure}"
