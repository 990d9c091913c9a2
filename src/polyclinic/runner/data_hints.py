"""Hints about data that can be read and yet may be the wrong ones: what `study check` says, and refuses nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from polyclinic.data.file_source import FileSource
from polyclinic.data.labels import MOST_CLASSES, tells_class, to_number
from polyclinic.data.listing import Listing
from polyclinic.data.partitions.base import Sites
from polyclinic.data.partitions.simple import Column
from polyclinic.data.parts import spread
from polyclinic.data.source import Source
from polyclinic.data.survey_folders import one_to_one
from polyclinic.errors import BadInput

FEW_PATIENTS = 10
FEW_TRAINED = 5  #: training images of a site
FILLED = 0.2  #: share of label_range that labels have at least, where its unit is theirs
NEARLY_ALL = 0.5  #: classes for each image, above which labels are names of images and no classes
NUMBER = re.compile(r"\d+([.-]\d+)?")  #: also as the name of a site, in which a comma is "-"
NAMED = 4


def data_hints(data: Source, sites: Sites) -> list[str]:
    """One sentence for each thing that looks odd."""
    if not isinstance(data, FileSource):
        return []
    listing = data.listing()
    found = [
        *_labels(listing),
        *_patients(listing),
        *_hospitals(listing),
        *(_sites(data, listing, sites) if isinstance(sites, Column) else []),
    ]
    return [f"hint: {sentence}" for sentence in found]


def _labels(listing: Listing) -> list[str]:
    count, classes = len(listing), listing.classes
    if listing.label_range is not None and count:
        return _range(np.asarray(listing.labels, float), listing.label_range)
    if len(classes) > MOST_CLASSES and len(classes) > NEARLY_ALL * count:
        return [f"{len(classes)} classes for {count} images; does data.label name the right column?"]
    if len(classes) > MOST_CLASSES and all(to_number(name) is not None for name in classes):
        return [
            f"the labels are {len(classes)} different numbers; if they are values and not classes, set task.name = "
            '"regression" and data.label_range'
        ]
    return []


def _range(labels: np.ndarray, bounds: tuple[float, float]) -> list[str]:
    low, high = float(labels.min()), float(labels.max())
    if len(labels) < 2 or high - low >= FILLED * (bounds[1] - bounds[0]):
        return []
    said = f"labels are from {low:g} to {high:g}, and data.label_range is from {bounds[0]:g} to {bounds[1]:g}"
    return [f"{said}; have both the same unit?"]


def _patients(listing: Listing) -> list[str]:
    if listing.patient is None:
        return []
    patients = [str(patient) for patient in listing.patient]
    if listing.site is not None and one_to_one(patients, [str(site) for site in listing.site]):
        return ["each site has one patient; does the setting for patients name the right column?"]
    if len(set(patients)) < min(FEW_PATIENTS, len(patients)):
        said = f"{len(patients)} images are of {len(set(patients))} patients, which stay together"
        return [f"{said}: splits will be uneven; is the patient the right column?"]
    return []


def _hospitals(listing: Listing) -> list[str]:
    if listing.site is None or not listing.classes:
        return []
    sites, labels = np.asarray(listing.site).astype(str), np.asarray(listing.labels, int)
    counts = [np.bincount(labels[sites == site], minlength=len(listing.classes)) for site in sorted(set(sites))]
    return [class_is_site(*found)] if (found := tells_class(counts)) else []


def class_is_site(told: float, most: float) -> str:
    """What to say where the hospital nearly is the class."""
    return (
        f"the site alone tells the class of {told:.0%} of the images (the most frequent class has {most:.0%}): a model "
        "can learn to recognise hospitals instead of diseases; look at the scores of each site, and add images of "
        "other classes there"
    )


def _sites(data: FileSource, listing: Listing, sites: Sites) -> list[str]:
    names = set() if listing.site is None else {str(site) for site in listing.site}
    if len(names) > MOST_CLASSES and all(NUMBER.fullmatch(name) for name in names):
        return [f"the sites are {len(names)} different numbers; does data.site name the right column?"]
    try:
        where = spread(data.without_pixels(), data, sites)
    except BadInput:  # a run says what is wrong
        return []
    counts = {site: (len(parts["train"]), len(parts["validation"])) for site, parts in where.items()}
    few = [site for site, (trained, validated) in counts.items() if trained < FEW_TRAINED or not validated]
    return [_sentence(few, counts)] if few else []


def _sentence(few: Sequence[str], counts: dict[str, tuple[int, int]]) -> str:
    named = [f"{site} ({counts[site][0]} training, {counts[site][1]} validation images)" for site in few[:NAMED]]
    more = [f"and {len(few) - NAMED} more"] if len(few) > NAMED else []
    return f"sites with very few images: {', '.join([*named, *more])}; join them, or leave them out with sites.names"
