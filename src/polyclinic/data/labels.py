"""Mapping of a source's labels to a study's classes: select, merge, rename."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import SupportsInt

import numpy as np

from polyclinic.errors import BadInput
from polyclinic.randomness import numpy_rng

#: a label as it stands in a file, or its name
Value = int | float | str | bool


def classes_of(
    values: np.ndarray,
    names: Sequence[str] | np.ndarray | None = None,
    merge: Mapping[str, Sequence[Value]] | None = None,
    rename: Mapping[str, str] | None = None,
    *,
    field: str = "data.merge",
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Class indices (int64 [N]) and the names of the classes, out of labels as they stand in a file.

    `names[v]` is the name of the integer label v. `merge` makes one class of several labels, `rename` gives a
    label another name; both take labels or their names. Classes are in the order of their smallest label.
    """
    present, position = np.unique(values, return_inverse=True)
    order = sorted(range(len(present)), key=lambda i: natural(str(present[i])))
    titles = [_name(present[i], names) for i in order]
    aliases = {str(present[i]): title for i, title in zip(order, titles, strict=True)}
    becomes = {title: title for title in titles}
    for target, members in (merge or {}).items():
        becomes |= dict.fromkeys((_find(member, aliases, f"{field}.{target}") for member in members), target)
    for old, new in (rename or {}).items():
        becomes[_find(old, aliases, "data.rename")] = new
    final = [becomes[title] for title in titles]
    classes = tuple(dict.fromkeys(final))
    number = np.empty(len(present), dtype=np.int64)
    number[order] = [classes.index(name) for name in final]
    return number[position.reshape(-1)], classes


def kept(columns: Mapping[str, np.ndarray], keep: Mapping[str, Sequence[Value]]) -> np.ndarray:
    """Indices of the rows that have, in every column that `keep` names, one of its values."""
    chosen = np.array(True)
    for name, wanted in keep.items():
        if name not in columns:
            raise BadInput(f"data.keep: there is no '{name}'; choose from {', '.join(sorted(columns))}")
        texts = np.array([_text(value) for value in columns[name].reshape(-1).tolist()])
        absent = [value for value in wanted if _text(value) not in texts]
        if absent:
            raise BadInput(f"data.keep.{name}: no image has the value {absent[0]!r}")
        chosen = chosen & np.isin(texts, [_text(value) for value in wanted])
    if not chosen.any():
        raise BadInput("data.keep: no image has all the values to keep; keep more")
    return np.flatnonzero(chosen)


def natural(text: str) -> list[tuple[int, int, str]]:
    """A sorting key that puts 2 before 10, and numbers before words."""
    parts = re.split(r"(\d+)", text)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part]


def _name(value: SupportsInt, names: Sequence[str] | np.ndarray | None) -> str:
    if names is None:
        return str(value)
    if not 0 <= int(value) < len(names):
        raise BadInput(f"data.labels: the label {value} has no name: there are {len(names)} names, from 0 on")
    return str(names[int(value)])


def _find(wanted: Value, aliases: Mapping[str, str], field: str) -> str:
    """The name of the label that `wanted` means: a label as it stands in the file, or a name."""
    if str(wanted) in aliases:
        return aliases[str(wanted)]
    if wanted in aliases.values():
        return str(wanted)
    raise BadInput(f"{field}: no image has the label {wanted!r}; there are {', '.join(aliases)}")


def _text(value: object) -> str:
    """One spelling for a value however it is stored: true and 1.0 and 1 differ, 2 and '2' do not."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def balanced(labels: np.ndarray, per_class: int, seed: int) -> np.ndarray:
    """Indices, ascending, of `per_class` images of each class, drawn by the seed."""
    chosen = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        if len(members) < per_class:
            raise BadInput(f"data.per_class: class {label} has only {len(members)} images, not {per_class}")
        chosen.append(numpy_rng(seed, "per_class", int(label)).choice(members, per_class, replace=False))
    return np.sort(np.concatenate(chosen))
