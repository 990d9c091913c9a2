"""What only the images and the file of first weights can tell about a study, before it runs."""

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from polyclinic.data.dataset import SPLITS
from polyclinic.data.doubles import near_doubles, said_of_doubles
from polyclinic.data.labels import MOST_CLASSES, refuse_unlearnable, tells_class, to_number
from polyclinic.data.listing import Listing, Looked, look_at, unreadable
from polyclinic.data.partitions import PARTITIONS
from polyclinic.data.partitions.base import Column, Sites
from polyclinic.data.partitions.clusters import Clusters
from polyclinic.data.parts import prepare, spread
from polyclinic.data.pixels import Fit, fit_image
from polyclinic.data.plots import contact_sheet
from polyclinic.data.reading import is_image_name
from polyclinic.data.source import AtSites, FileSource, LabelledSource, Located, Source
from polyclinic.data.survey_folders import are_same_names, institutions_of, one_to_one
from polyclinic.errors import BadInput
from polyclinic.models import PUBLIC, RANDOM, WeightsFile, find_weights, is_importable, registry_of
from polyclinic.models.weights_file import nothing_fits
from polyclinic.runner.run.advice import class_is_site
from polyclinic.runner.run.assembly import Assembly
from polyclinic.study import Study
from polyclinic.study.checks import network_of

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
    model = study.model
    if model.weights in (RANDOM, PUBLIC):  # public ones come with the backbone
        return _counted_images(study)
    size = model.input_size or study.data.size
    file = find_weights(model.weights, model.backbone, size=size, arguments=model.arguments)
    if file is None:
        return _counted_images(study)
    if not is_importable(model.backbone) and model.backbone in registry_of(model.backbone).builtin:
        return [*_counted_images(study), _named_alike(study, file)]
    if not _are_here(study.data):  # channels and classes are not known: the first and last layer cannot be compared
        network = network_of(study)
        file.renamed(network.own_name).fitted(network.state_dict(), model.backbone)
        return [AWAY, f"{file.path}: its tensors fit {model.backbone}"]
    parts = prepare(study.data, study.sites)
    network = Assembly(study, parts, Path()).build_model()
    fitted = file.renamed(network.own_name).fitted(network.state_dict(), model.backbone)
    return [_counted(parts.info["counts"]), f"{file.path}: {fitted.sentence()}"]


def _counted_images(study: Study) -> list[str]:
    """How many images there are in each part, where the study's settings depend on it."""
    data = study.data
    if all(setting is None for setting in (data.fold, data.test_per_class, data.test_total_per_class)):
        return []
    if not _are_here(data):
        return [AWAY]
    if study.sites.partition in PARTITIONS.builtin and not isinstance(study.sites, Clusters):
        where = spread(data.without_pixels(), data, study.sites)
        return [_counted({site: {name: len(parts[name]) for name in SPLITS} for site, parts in where.items()})]
    return [_counted(prepare(data, study.sites).info["counts"])]


def left_out(study: Study) -> list[str]:
    """Which images of its source a study does not use, and why."""
    data = study.data
    if not isinstance(data, FileSource) or isinstance(study.sites, Clusters) or not _are_here(data):
        return []
    dataset, found = data.without_pixels(), []
    if isinstance(data, LabelledSource) and data.keep:
        with contextlib.suppress(BadInput):  # where the others have no label at all
            kept_back = len(data.model_copy(update={"keep": None}).listing()) - len(dataset)
            found += [f"{kept_back} by data.keep"] * (kept_back > 0)
    elsewhere = study.sites.left_out(dataset)
    found += [f"{count} of site '{name}', which sites.names lacks" for name, count in elsewhere.items()]
    used = sum(len(part) for parts in spread(dataset, data, study.sites).values() for part in parts.values())
    if rest := len(dataset) - sum(elsewhere.values()) - used:
        settings = ("opt_out", "test_per_class", "test_total_per_class")
        named = [f"data.{name}" for name in settings if getattr(data, name) is not None]
        found.append(f"{rest} by {' and '.join(named) or 'sites.partition'}")
    return [f"images left out: {', '.join(found)}"] if found else []


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


def check_images(data: Source) -> list[str]:
    """What is wrong with the images themselves: BadInput where there are none, or some cannot be read; else what was
    looked at, a sentence each. Of many images so many are read, taken evenly."""
    if not isinstance(data, FileSource):
        return []
    data.refuse_missing_path()
    listing = data.listing()
    data.refuse_files_outside(list(data.files()))
    chosen, looked = _looked_at(listing)
    if problems := [one.problem for one in looked if one.problem]:
        raise BadInput(unreadable(problems, len(chosen)))
    every = f"all {len(listing)} images" if len(chosen) == len(listing) else f"{len(chosen)} of {len(listing)} images"
    every += " and their masks" if listing.mask is not None else ""
    classes = listing.classes if listing.classes != ("image",) else ()  # what images with masks and no label have
    if classes:
        refuse_unlearnable(Counter(classes[label] for label in listing.labels), "data", cure="name a column or array")
    found = f"{every} can be read" + (f"; classes: {', '.join(classes)}" if classes else "")
    return [found, *_classes_that_are_sites(data, listing), *_doubles(listing, chosen, looked)]


def _looked_at(listing: Listing) -> tuple[list[int], list[Looked]]:
    """The images that are read, taken evenly, and what was seen of each."""
    chosen = np.unique(np.linspace(0, len(listing) - 1, min(len(listing), READ_AT_MOST)).astype(int)).tolist()
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return chosen, list(pool.map(lambda i: look_at(listing, i), chosen))


def _doubles(listing: Listing, chosen: Sequence[int], looked: Sequence[Looked]) -> list[str]:
    """Images that are there twice, and those that nearly are."""
    names = [listing.name(i) for i in chosen]
    columns = {"site": listing.site, "split": listing.split}
    known = {what: [str(column[i]) for i in chosen] for what, column in columns.items() if column is not None}
    if len(listing.classes) > 1:
        known = {"class": [listing.classes[listing.labels[i]] for i in chosen], **known}
    found = said_of_doubles(np.array([one.digest for one in looked]), names, known)
    pairs = _near(looked)
    if pairs:
        first, second = pairs[0]
        found.append(
            f"hint: {len(pairs)} pair{'s' * (len(pairs) > 1)} of images look nearly the same, such as {names[first]} "
            f"and {names[second]}; `polyclinic data inspect` draws them: are they of one patient?"
        )
    return found


def _near(looked: Sequence[Looked]) -> list[tuple[int, int]]:
    seen = [one.thumbnail for one in looked if one.thumbnail is not None]
    digests = np.array([one.digest for one in looked if one.thumbnail is not None])
    return near_doubles(np.stack(seen), digests) if len(seen) > 1 else []


def draw_doubles(data: Source, target: Path) -> str:
    """A picture of images that are nearly the same, each above its double, and a sentence; nothing where there are
    none."""
    listing = data.listing() if isinstance(data, FileSource) else None
    if listing is None or not (pairs := _near((found := _looked_at(listing))[1])[:SHOWN]):
        return ""
    fit = Fit(data.size, channels=3)
    numbers = [[found[0][one[row]] for one in pairs] for row in (0, 1)]
    images = [np.stack([fit_image(listing.picture(i), fit, 3) for i in some]) for some in numbers]
    captions = [f"{listing.name(i)[-26:]}\n{listing.name(k)[-26:]}" for i, k in zip(*numbers, strict=True)]
    rows = {"image": images[0], "nearly the same": images[1]}
    contact_sheet(rows, target, captions, "Images that are nearly the same")
    return f"wrote {target}: images that are nearly the same"


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
    if isinstance(data, Located):
        try:
            data.refuse_missing_path()
        except BadInput:
            return False
    return not isinstance(data, AtSites)


def _counted(counts: Mapping[str, Mapping[str, int]]) -> str:
    return ", ".join(f"{name} images: {sum(own[name] for own in counts.values())}" for name in SPLITS)


FEW_PATIENTS = 10
FEW_TRAINED = 5  #: training images of a site
FILLED = 0.2  #: share of label_range that labels have at least, where its unit is theirs
NEARLY_ALL = 0.5  #: classes for each image, above which labels are names of images and no classes
NUMBER = re.compile(r"\d+([.-]\d+)?")  #: also as the name of a site, in which a comma is "-"
NAMED = 4
SHOWN = 8  #: pairs in a picture


def data_hints(data: Source, sites: Sites) -> list[str]:
    """One sentence for each thing that looks odd; BadInput where the images cannot be spread over the sites."""
    if not isinstance(data, FileSource):
        return []
    listing = data.listing()
    found = [*_odd_labels(listing), *_odd_patients(listing)]
    if listing.site is not None and listing.classes:
        of_site, labels = np.asarray(listing.site).astype(str), np.asarray(listing.labels, int)
        counts = [np.bincount(labels[of_site == site], minlength=len(listing.classes)) for site in sorted(set(of_site))]
        found += [class_is_site(*told)] if (told := tells_class(counts)) else []
    try:
        found += _odd_sites(data, listing, sites)
    except BadInput as error:  # what a run would say, with what may be its reason
        raise BadInput("\n".join([str(error), *(f"hint: {sentence}" for sentence in found)])) from None
    return [f"hint: {sentence}" for sentence in found]


def _odd_labels(listing: Listing) -> Iterator[str]:
    count, classes = len(listing), listing.classes
    if listing.label_range is not None and count:
        labels, (lowest, highest) = np.asarray(listing.labels, float), listing.label_range
        low, high = float(labels.min()), float(labels.max())
        if count > 1 and high - low < FILLED * (highest - lowest):
            said = f"labels are from {low:g} to {high:g}, and data.label_range is from {lowest:g} to {highest:g}"
            yield f"{said}; have both the same unit?"
    elif len(classes) > MOST_CLASSES and len(classes) > NEARLY_ALL * count:
        yield f"{len(classes)} classes for {count} images; does data.label name the right column?"
    elif len(classes) > MOST_CLASSES and all(to_number(name) is not None for name in classes):
        yield (
            f"the labels are {len(classes)} different numbers; if they are values and not classes, set task.name = "
            '"regression" and data.label_range'
        )


def _odd_patients(listing: Listing) -> Iterator[str]:
    patients = [] if listing.patient is None else [str(patient) for patient in listing.patient]
    if patients and listing.site is not None and one_to_one(patients, [str(site) for site in listing.site]):
        yield "each site has one patient; does the setting for patients name the right column?"
    elif len(set(patients)) < min(FEW_PATIENTS, len(patients)):
        said = f"{len(patients)} images are of {len(set(patients))} patients, which stay together"
        yield f"{said}: splits will be uneven; is the patient the right column?"


def _odd_sites(data: FileSource, listing: Listing, sites: Sites) -> Iterator[str]:
    names = set() if listing.site is None else {str(site) for site in listing.site}
    by_column = isinstance(sites, Column)
    if by_column and len(names) > MOST_CLASSES and all(NUMBER.fullmatch(name) for name in names):
        yield f"the sites are {len(names)} different numbers; does data.site name the right column?"
        return
    if sites.partition not in PARTITIONS.builtin or isinstance(sites, Clusters):  # which may look at pixels
        return
    where = spread(data.without_pixels(), data, sites)
    few = [
        f"{site} ({len(parts['train'])} training, {len(parts['validation'])} validation images)"
        for site, parts in where.items()
        if len(parts["train"]) < FEW_TRAINED or (data.validation and not len(parts["validation"]))
    ]
    named = ", ".join([*few[:NAMED], *([f"and {len(few) - NAMED} more"] if len(few) > NAMED else [])])
    if few:
        cure = "join them, or leave them out with sites.names" if by_column else "take fewer sites"
        yield f"sites with very few images: {named}; {cure}"
