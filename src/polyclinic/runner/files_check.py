"""What only the images and the file of first weights can tell about a study, before it runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from polyclinic.data.dataset import SPLITS
from polyclinic.data.file_source import FileSource
from polyclinic.data.listing import Listing, problem_of, unreadable
from polyclinic.data.partitions import PARTITIONS
from polyclinic.data.partitions.clusters import Clusters
from polyclinic.data.parts import PreparedSites, prepare, spread
from polyclinic.data.reading import is_image_name
from polyclinic.data.source import AtSites, Source
from polyclinic.data.survey_folders import are_same_names, institutions_of
from polyclinic.errors import BadInput
from polyclinic.models import PUBLIC, RANDOM, WeightsFile, find_weights, is_importable, registry_of
from polyclinic.models.weights_file import nothing_fits
from polyclinic.runner.assembly import Assembly
from polyclinic.study import Study
from polyclinic.study.network import network_of

#: images that `study check` reads
READ_AT_MOST = 1000
#: DICOM headers that it reads
INSTITUTIONS_OF = 200
AWAY = "the images are not here, and were not counted"


def check_files(study: Study) -> list[str]:
    """What was found, a sentence each; BadInput where the study cannot run with these images or these weights.

    Images are counted only where the study asks for a fold or for so many test images of each class. They are prepared,
    as a run does it, only where their pixels decide: for sites that differ by their images, and for a file of weights
    of somebody else's network. Of a file for a backbone of the package only the names are compared.
    """
    model, named = study.model, study.model.weights not in (RANDOM, PUBLIC)  # public ones come with the backbone
    size = model.input_size or study.data.size
    file = find_weights(model.weights, model.backbone, size=size, arguments=model.arguments) if named else None
    if file is None:
        return _counted_images(study)
    if not is_importable(model.backbone) and model.backbone in registry_of(model.backbone).builtin:
        return [*_counted_images(study), _named_alike(study, file)]
    return _compared(study, file)


def _counted_images(study: Study) -> list[str]:
    """How many images there are in each part, where the study's settings depend on it."""
    if not _counts_images(study):
        return []
    if not _are_here(study.data):
        return [AWAY]
    if study.sites.partition in PARTITIONS.builtin and not isinstance(study.sites, Clusters):
        where = spread(study.data.without_pixels(), study.data, study.sites)
        return [_counted({site: {name: len(parts[name]) for name in SPLITS} for site, parts in where.items()})]
    return [_counted(prepare(study.data, study.sites).info["counts"])]


def _named_alike(study: Study, file: WeightsFile) -> str:
    """How many tensors of a file have names of the study's network, and a warning where few do; BadInput for none."""
    backbone, own = study.model.backbone, network_of(study).state_dict()
    fit = [name for name in file.tensors if name in own]
    if not fit:
        raise BadInput(nothing_fits(file.path, backbone, list(file.tensors), list(own)))
    many = f"{len(fit)} of {len(file.tensors)} tensors have names of {backbone}"
    if 2 * len(fit) < len(file.tensors):
        return f"WARNING: {file.path}: only {many}; it may be a file of another network"
    return f"{file.path}: {many}; the run compares their shapes"


def _compared(study: Study, file: WeightsFile) -> list[str]:
    """What the images and the weights are, both read as a run does it."""
    parts = prepare(study.data, study.sites) if _are_here(study.data) else None
    return [AWAY if parts is None else _counted(parts.info["counts"]), _weights_sentence(study, file, parts)]


def _counts_images(study: Study) -> bool:
    data = study.data
    return any(setting is not None for setting in (data.fold, data.test_per_class, data.test_total_per_class))


def check_images(data: Source) -> list[str]:
    """What is wrong with the images themselves: BadInput where there are none, or some cannot be read; else what was
    looked at, a sentence. Of many images so many are read, taken evenly."""
    if not isinstance(data, FileSource):
        return []
    data.refuse_missing_path()
    listing = data.listing()
    data.refuse_files_outside(list(data.files()))
    chosen = np.unique(np.linspace(0, len(listing) - 1, min(len(listing), READ_AT_MOST)).astype(int)).tolist()
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        problems = [problem for problem in pool.map(lambda i: problem_of(listing, i), chosen) if problem]
    if problems:
        raise BadInput(unreadable(problems, len(chosen)))
    every = f"all {len(listing)} images" if len(chosen) == len(listing) else f"{len(chosen)} of {len(listing)} images"
    every += " and their masks" if listing.mask is not None else ""
    classes = listing.classes if listing.classes != ("image",) else ()  # what images with masks and no label have
    found = f"{every} can be read" + (f"; classes: {', '.join(classes)}" if classes else "")
    return [found, *_classes_that_are_sites(data, listing)]


def _classes_that_are_sites(data: FileSource, listing: Listing) -> list[str]:
    """A warning where the classes have the names of the sites, or of the institutions that DICOM files name."""
    taken = set() if listing.site is None else {str(site) for site in listing.site}
    images = [file for file in map(Path, data.files()) if is_image_name(file)]
    chosen = images[:: -(-len(images) // INSTITUTIONS_OF)] if images else []
    for names in (taken, set(institutions_of(chosen) or ())):
        if len(names) > 1 and are_same_names(listing.classes, names):
            return [
                f"WARNING: the classes are hospitals ({', '.join(listing.classes)}): a model would learn to tell "
                "hospitals apart, and not what images show. Put a folder per class into each hospital's folder and "
                "let `polyclinic study new --for` find both, or name the column of the classes in data.label"
            ]
    return []


def _are_here(data: Source) -> bool:
    """Whether the images are on this machine."""
    if isinstance(data, FileSource):
        try:
            data.refuse_missing_path()
        except BadInput:
            return False
    return not isinstance(data, AtSites)


def _counted(counts: Mapping[str, Mapping[str, int]]) -> str:
    return ", ".join(f"{name} images: {sum(own[name] for own in counts.values())}" for name in SPLITS)


def _weights_sentence(study: Study, file: WeightsFile, parts: PreparedSites | None) -> str:
    """How much of the file the network takes over. Without the images, channels and classes are not known, so that the
    first and the last layer cannot be compared."""
    network = network_of(study) if parts is None else Assembly(study, parts, Path()).build_model()
    fitted = file.renamed(network.own_name).fitted(network.state_dict(), study.model.backbone)
    return f"{file.path}: " + (fitted.sentence() if parts else f"its tensors fit {study.model.backbone}")
