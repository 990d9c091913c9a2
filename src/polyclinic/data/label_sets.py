"""Label sets: sites that know only some of a study's classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.errors import BadInput
from polyclinic.settings import nearest

SETTING = "federation.label_sets"


def unknown_classes(
    known: Mapping[str, Sequence[str]], sites: Sequence[str], classes: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """By site, the numbers of the classes that it does not know. BadInput for names of sites and classes that there are
    not, and for a class that no site knows."""
    for site, some in known.items():
        if site not in sites:
            raise BadInput(f"{SETTING}: there is no site '{site}'; the sites are {', '.join(sites)}")
        for name in some:
            if name not in classes:
                hint = nearest(name, list(classes))
                raise BadInput(f"{SETTING}: there is no class '{name}'{hint}; the classes are {', '.join(classes)}")
        if len(set(some)) < 2:
            raise BadInput(f"{SETTING}: site '{site}' must know two classes or more to tell them apart; name them")
    everybody = {name for site in sites for name in known.get(site, classes)}
    if lost := [name for name in classes if name not in everybody]:
        raise BadInput(f"{SETTING}: no site knows '{lost[0]}'; name it at a site, or take the class out of the data")
    return {site: tuple(n for n, name in enumerate(classes) if name not in some) for site, some in known.items()}


def without_classes(data: SiteData, unknown: Sequence[int]) -> SiteData:
    """A site's images without those of classes that it does not know: nobody there could have labelled them."""
    return replace(
        data,
        train=_without(data.train, unknown),
        validation=_without(data.validation, unknown),
        test=_without(data.test, unknown),
    )


def _without(part: ImageSet, unknown: Sequence[int]) -> ImageSet:
    rows = np.flatnonzero(~np.isin(np.asarray(part.labels), unknown))
    if len(rows) == len(part):
        return part
    more = {name: getattr(part, name) for name in ("masks", "cases", "subgroup", "columns", "geometry")}
    kept = {name: None if array is None else np.asarray(array)[rows] for name, array in more.items()}
    return ImageSet(np.asarray(part.images)[rows], np.asarray(part.labels)[rows], **kept)
