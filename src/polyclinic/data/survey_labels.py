"""What labels are: classes, values to predict, or masks."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

MOST_CLASSES = 12  #: more different numbers than that are values
MOST_GAPS = 0.2  #: share of the labels that may be no number where the others are
FEWEST_OF_A_CLASS = 0.05  #: share of the labels from which on "none" is a class: nothing was found in these images
#: what people write where they know nothing
NOTHING = {"", "n/a", "na", "nan", "none", "null", "unknown", "missing", "-", "?"}


@dataclass(frozen=True)
class Labels:
    """The task that labels are for; of classes how many images each has, of values their bounds."""

    task: Literal["classification", "regression", "segmentation"]
    classes: dict[str, int] = field(default_factory=dict)
    bounds: tuple[float, float] | None = None

    @classmethod
    def masks(cls) -> Labels:
        return cls("segmentation")


def labels_of(texts: Sequence[str]) -> Labels:
    """Values where nearly all labels are numbers and many differ; else classes. What is no label does not count."""
    known = [text for text, gap in zip(texts, gaps_in(texts), strict=True) if not gap]
    values = numbers_in(known)
    if values is None:
        return Labels("classification", dict(Counter(known).most_common()))
    return Labels("regression", bounds=(math.floor(min(values)), math.ceil(max(values))))


def code_notes(texts: Sequence[str]) -> tuple[str, ...]:
    """A note about a value that may stand for "not known": the only negative one, or one of nines far above all."""
    values = numbers_in(texts) or [0.0]
    different = sorted(set(values))
    negative = [value for value in different if value < 0]
    odd = negative if len(negative) == 1 else []
    if len(different) > 1 and re.fullmatch("9{2,}", f"{different[-1]:g}") and different[-1] > 3 * different[-2]:
        odd = [*odd, different[-1]]
    return tuple(
        f"{values.count(code)} of {len(values)} labels are {code:g}: if it stands for 'not known', leave these out"
        for code in odd
    )


def gaps_in(texts: Sequence[str]) -> list[bool]:
    """Whether somebody wrote that there is no label. "none" is a class, where words are labels and many images have it:
    none of the diseases."""
    plain = [text.strip().lower() for text in texts]
    others = [text for text in plain if text not in NOTHING]
    is_class = plain.count("none") >= max(2, FEWEST_OF_A_CLASS * len(plain)) and numbers_in(others) is None
    return [text in NOTHING and not (is_class and text == "none") for text in plain]


def are_labels(texts: Sequence[str]) -> list[bool]:
    """Whether each is a label; where nearly all labels are values, one that is none counts as no label."""
    gaps = gaps_in(texts)
    are_values = numbers_in([text for text, gap in zip(texts, gaps, strict=True) if not gap]) is not None
    return [not gap and (not are_values or to_number(text) is not None) for text, gap in zip(texts, gaps, strict=True)]


def numbers_in(texts: Sequence[str]) -> list[float] | None:
    """The values of labels, without those that are none; None where labels are classes."""
    found = [value for value in map(to_number, texts) if value is not None]
    is_value = found and len(set(found)) > MOST_CLASSES and len(found) >= (1 - MOST_GAPS) * len(texts)
    return found if is_value else None


def to_number(text: str | float) -> float | None:
    """A finite number, with a decimal point or a decimal comma; 1,000 may be a thousand, and is none."""
    if isinstance(text, str) and re.fullmatch(r"\s*[+-]?\d+,(\d{1,2}|\d{4,})\s*", text):
        text = text.replace(",", ".")
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
