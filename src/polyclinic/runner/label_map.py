"""Label maps: classes that a study, or one of its sites, calls otherwise than the model does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from polyclinic.errors import BadInput
from polyclinic.settings import nearest

#: written instead of a model's class: images of this class are left out
LEFT_OUT = "-"


@dataclass(frozen=True)
class LabelMap:
    """`of_all`: the model's class by the study's; `of_site`: the same of single sites, which counts before it."""

    of_all: Mapping[str, str]
    of_site: Mapping[str, Mapping[str, str]]

    @classmethod
    def parse(cls, given: Sequence[str], sites: Sequence[str], classes: Sequence[str]) -> LabelMap:
        """From `ill=sick` and `north:ill=sick`; BadInput for what is neither."""
        of_all: dict[str, str] = {}
        of_site: dict[str, dict[str, str]] = {}
        for text in given:
            where, _, pair = text.rpartition(":")
            name, equals, other = pair.partition("=")
            if not equals or not name or not other:
                raise BadInput(f"--label-map {text}: write CLASS=CLASS_OF_MODEL, or SITE:CLASS=CLASS_OF_MODEL")
            if where and where not in sites:
                raise BadInput(f"--label-map {text}: there is no site '{where}'; the sites are {', '.join(sites)}")
            if name not in classes:
                hint = nearest(name, list(classes))
                raise BadInput(
                    f"--label-map {text}: there is no class '{name}'{hint}; choose from {', '.join(classes)}"
                )
            (of_site.setdefault(where, {}) if where else of_all)[name] = other
        return cls(of_all, of_site)

    def numbers(self, site: str, classes: Sequence[str], of_model: Sequence[str]) -> np.ndarray:
        """For each class of the study its number in the model, -1 for one that is left out. BadInput for a class that
        the model does not know."""
        found = []
        for name in classes:
            meant = self.of_site.get(site, {}).get(name, self.of_all.get(name, name))
            if meant != LEFT_OUT and meant not in of_model:
                raise BadInput(
                    f"classes: the model does not know '{meant}' (it knows {', '.join(of_model)}); add --label-map "
                    f"{name}=CLASS_OF_MODEL, or {name}={LEFT_OUT} to leave these images out"
                )
            found.append(-1 if meant == LEFT_OUT else list(of_model).index(meant))
        return np.array(found, np.int64)
