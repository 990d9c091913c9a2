"""`polyclinic study new --for DIR`: a study for somebody's own images, with the reason of each choice beside it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from polyclinic.data.allowed_paths import first_outside
from polyclinic.data.datasets.folder import images_below
from polyclinic.data.survey import PATIENT, patients_by_name, sites_by_name, survey
from polyclinic.data.survey_cases import Cases, Survey
from polyclinic.data.survey_folders import like_names
from polyclinic.errors import BadInput
from polyclinic.files import atomic_write

SITES = 3  #: simulated ones, where the images do not say where they were taken
SIDE = {"classification": 64, "regression": 64, "segmentation": 64}
FEW_IMAGES = 5000  #: up to so many, a network that has seen other images already is better than one that has not
FEW_AT_A_SITE = 10  #: images of a site, below which the study says so
TRAINED = 0.65  #: share of the images that are trained on
STEPS = 10  #: of a site in a round, at least
FEATURES = 1024  #: numbers of an image, of which a site sends sums
UNIT = re.compile(r"_(months|years|days|mm)$", re.I)  #: at the end of a column's name
#: what is said of a range that the images' labels have, and not somebody who knows which values are possible
RANGE_TELLS = (
    "TAKEN FROM YOUR DATA: write the range that is possible; between real hospitals these two numbers would tell the "
    "youngest and the oldest patient"
)
#: what holds for a site that has no more training images than an image has numbers
SUMS_TELL = "# fine for a simulation; between real hospitals these sums give single images away, see docs/encoders.md"

OUTSIDE = "allow_outside = true  # the table lists images that lie outside of its folder"
#: what is said where nothing names patients
NO_PATIENTS = "no patients found: two images of one patient may fall on both sides of the split; name"


@dataclass(frozen=True)
class Hints:
    """Hints of somebody about images: regular expressions that find site and patient in names of files, and names of
    columns or arrays; '' where a look shall find it."""

    site: str = ""
    patient: str = ""
    images: str = ""
    label: str = ""


def study_for(
    images: Path,
    path: Path,
    hints: Hints = Hints(),  # noqa: B008 (frozen)
    *,
    force: bool = False,
) -> tuple[str, list[str]]:
    """The text of a study for these images, and sentences about what was found. A table of cases, where one is
    needed, is written beside the study; with `force` also over an earlier one."""
    table = path.with_name(f"{path.stem}_cases.csv")
    found = survey(images, ignore=table if force else None, images=hints.images, label=hints.label)
    found = sites_by_name(found, hints.site) if hints.site else found
    found = patients_by_name(found, hints.patient) if hints.patient else found
    said = [_what(found), *found.notes, *_warnings(found)]
    if found.cases is not None:
        _refuse_table(table, found.path, force)
        atomic_write(table, found.cases.as_csv(table.parent.resolve()))
        said.append(f"wrote {table}, which lists them; {_mend(found)}, then write both anew with --force")
        text = _text(found, table.name, said, outside=_lie_outside(found.cases, table.parent))
    else:
        text = _text(found, os.path.relpath(found.path, path.parent.resolve()), said, outside=_links_outside(found))
    return text, [*said, *([f"label_range: {RANGE_TELLS}"] if found.labels.bounds else [])]


def _warnings(found: Survey) -> list[str]:
    """Sentences that somebody should know before the first run."""
    where = "an array patient" if found.source == "npz" else "a column patient, or give --patient REGEX"
    patients = [] if found.patients else [f"{NO_PATIENTS} {where}"]
    few = {name: count for name, count in found.sites.items() if count < FEW_AT_A_SITE}
    small = f"with fewer than {FEW_AT_A_SITE} images train on very little, and may have no validation or test image"
    return [*patients, *([f"sites {small}: {_counts(few)}"] if few else []), *like_names(found.sites)]


def _links_outside(found: Survey) -> bool:
    """True where a file that the study reads lies outside of the folder of its path, by its path or by a link."""
    if found.source == "csv" and found.table is not None:
        return _lie_outside(found.table, found.path.parent)
    return found.source == "folder" and first_outside(images_below(found.path), found.path) is not None


def _refuse_table(table: Path, own: Path, force: bool) -> None:
    """BadInput where a table is there already; the table that was looked at is never written over."""
    if table.exists() and table.resolve() == own.resolve():
        raise BadInput(f"{table}: is the table that --for reads; name another study, so that it stays as it is")
    if table.exists() and not force:
        raise BadInput(f"{table}: exists already; --force writes it anew, or name another study")


def _mend(found: Survey) -> str:
    """The cure where something in the table of cases is wrong."""
    return f"to change a row, change {found.path.name}" if found.path.is_file() else "to change a row, change the files"


def _lie_outside(cases: Cases, folder: Path) -> bool:
    """True where an image or a mask that a table in this folder lists lies elsewhere."""
    names = [name for name in ("path", "mask") if name in cases.fields]
    return first_outside((cases.folder / row[name] for row in cases.rows for name in names), folder) is not None


def _what(found: Survey) -> str:
    """The images in one sentence."""
    words = {
        "classification": f"{len(found.labels.classes)} classes ({_counts(found.labels.classes)})",
        "regression": f"values from {_bounds(found)[0]:g} to {_bounds(found)[1]:g}",
        "segmentation": "masks",
    }[found.task]
    who = f", {found.patients} patients" if found.patients else ""
    where = f", {len(found.sites)} sites ({_counts(found.sites)})" if found.sites else ""
    return f"{found.images} images of {found.sizes}, {words}{who}{where}"


def _counts(counts: dict[str, int], most: int = 6) -> str:
    named = [f"{name}: {count}" for name, count in list(counts.items())[:most]]
    return ", ".join([*named, *(["..."] if len(counts) > most else [])])


def _bounds(found: Survey) -> tuple[float, float]:
    return found.labels.bounds or (0.0, 0.0)


# --- the study ------------------------------------------------------------------------------------------


def _text(found: Survey, path: str, said: list[str], *, outside: bool = False) -> str:
    head = ["# Written by `polyclinic study new --for`, which looked at the images and found:"]
    head += [f"#   {sentence}" for sentence in said]
    head += ["# Run it with `polyclinic run`. `polyclinic study new` without --for shows every setting there is."]
    data = [*_data(found, path), *([OUTSIDE] if outside else [])]
    blocks = [head, ["format = 1", "seed = 0"], data, _sites(found), _task(found), _model(found)]
    blocks += [_optimizer(found), _method(found), _evaluation(found), AUDIT]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _data(found: Survey, path: str) -> list[str]:
    lines = [
        "[data]",
        f"source = {json.dumps(found.source)}",
        f"path = {json.dumps(path)}  # from the folder of this file",
        f"size = {_side(found)}  # the images have {found.sizes}{_larger(found)}",
        *_shape(found),
    ]
    if found.source == "csv":
        names = {field: field for field in found.cases.fields} if found.cases else found.columns
        settings = {"path": "image", "label": "label", "mask": "mask", "site": "site", "split": "split"}
        settings["patient"] = "patient"
        lines += [f"{settings[field]} = {json.dumps(column)}" for field, column in names.items() if field in settings]
    if found.source == "npz":
        lines += _arrays(found.columns)
        if found.keeps_classes:
            classes = ", ".join(json.dumps(name, ensure_ascii=False) for name in found.labels.classes)
            name = json.dumps(found.columns["labels"])
            lines.append(f"keep = {{ {name} = [{classes}] }}  # the others have no label")
    if found.slices > 1:
        lines.append(f'slices = "middle"  # of about {found.slices} of each volume; "all" takes every one')
    if found.patient_pattern:
        seem = "file names seem to begin with the patient" if found.patient_pattern == PATIENT else "finds the patient"
        lines.append(
            f"patient = {json.dumps(found.patient_pattern)}  # {seem} ({found.patients} of them); take it out if not"
        )
    if found.site_pattern:
        lines.append(f"site = {json.dumps(found.site_pattern)}  # finds the site in the name of a file")
    if found.labels.bounds:
        low, high = found.labels.bounds
        lines += [f"# {RANGE_TELLS}", f"label_range = [{low:g}, {high:g}]  # lowest and highest possible value"]
        if unit := UNIT.search(found.columns.get("label", found.columns.get("labels", ""))):
            lines.append(f"unit = {json.dumps(unit.group(1).lower())}  # by the name of the label")
    return lines


def _shape(found: Survey) -> list[str]:
    """The setting that makes oblong images square, and its choices; none where no image is oblong."""
    if not found.sizes.oblong:
        return []
    side = _side(found)
    return [f'shape = "squash"  # made square of {side} x {side} px; "pad" keeps proportions, "crop" cuts off the ends']


def _arrays(columns: dict[str, str]) -> list[str]:
    """The arrays of an archive that a study must name, and sites and patients by any name."""
    usual = {"images": "images", "labels": "labels", "masks": "masks", "split": "split"}
    return [f"{what} = {json.dumps(name)}" for what, name in columns.items() if usual.get(what) != name]


def _side(found: Survey) -> int:
    """The side of the prepared images: what the images have, in sixteens, and at most a quick first size."""
    smallest = found.sizes.smallest_side or SIDE[found.task]
    return max(28, min(SIDE[found.task], smallest // 16 * 16)) if smallest >= 32 else 28


def _larger(found: Survey) -> str:
    """A note about a larger side; nothing, where the images are not larger."""
    return "; more takes longer, and may be better" if found.sizes.smallest_side > _side(found) else ""


def _sites(found: Survey) -> list[str]:
    if len(found.sites) > 1:
        return ["[sites]", 'partition = "column"  # each image stays at the site that it was taken at']
    return [
        "[sites]",
        'partition = "iid"  # nothing says where an image was taken: they are dealt out at random',
        *(["# if names of files say it: study new --for DIR --site REGEX --force"] if found.source != "npz" else []),
        f"count = {SITES}  # simulated sites",
    ]


def _task(found: Survey) -> list[str]:
    return ["[task]", f"name = {json.dumps(found.task)}"]


def fits_a_head(found: Survey) -> bool:
    """True where images are so few that a head on a network which others have trained is the best beginning."""
    return found.task != "segmentation" and found.images <= FEW_IMAGES


def _model(found: Survey) -> list[str]:
    if found.task == "segmentation":
        return [
            "[model]",
            'backbone = "unet-efficientnet-lite0"  # it finds masks',
            'weights = "public"  # it has seen other images already, which helps where there are few',
        ]
    if fits_a_head(found):
        return [
            "[model]",
            f'backbone = "efficientnet-lite0-{FEATURES}"  # a network with public weights, which nobody trains: only '
            "its last layer is fitted",
        ]
    return ["[model]", 'backbone = "resnet18"  # enough images to train a network from nothing']


def trained_at_a_site(found: Survey) -> int:
    """Training images of the smallest site."""
    fewest = min(found.sites.values()) if len(found.sites) > 1 else found.images // SITES
    return int(TRAINED * fewest)


def batch_size(found: Survey) -> int:
    """Images in a batch: so few that the smallest site takes ten steps in a pass, and not fewer than four."""
    wanted = trained_at_a_site(found) // STEPS
    return max(4, min(32, 2 ** max(0, wanted.bit_length() - 1)))


def _optimizer(found: Survey) -> list[str]:
    if fits_a_head(found):
        return [
            "[optimizer]",
            f"batch_size = {batch_size(found)}  # for methods that train step by step, if you try one",
        ]
    steps = max(1, trained_at_a_site(found) // batch_size(found))
    return [
        "[optimizer]",
        'name = "adamw"',
        "lr = 0.001",
        f"batch_size = {batch_size(found)}  # the smallest site takes about {steps} step{'s' * (steps > 1)} in a pass",
    ]


def _method(found: Survey) -> list[str]:
    if fits_a_head(found):
        return [
            "[method]",
            f'name = "analytic"  # {found.images} images are few: one round, in which each site sends sums of its '
            "features",
            *([SUMS_TELL] if trained_at_a_site(found) <= FEATURES else []),
        ]
    return [
        "[method]",
        'name = "fedavg"  # the usual first method; `polyclinic compare --methods standalone,fedavg,centralized` says '
        "what it gains",
        f"rounds = {8 if found.task == 'segmentation' else 20}",
        *_passes(found),
    ]


def _passes(found: Survey) -> list[str]:
    """Passes of a site in a round, where one pass has too few steps to learn anything. The site of middle size sets
    the pace: all sites make as many passes, so that a very small one would make the large ones slow."""
    middle = median(found.sites.values()) if len(found.sites) > 1 else found.images // SITES
    steps = max(1, int(TRAINED * middle) // batch_size(found))
    passes = -(-STEPS // steps)
    return [f"local_epochs = {passes}  # passes in a round: a site of middle size takes about {STEPS} steps"] * (
        passes > 1
    )


def _evaluation(found: Survey) -> list[str]:
    if fits_a_head(found):
        return ["[evaluation]", 'select = "last"  # there is one round only']
    if found.images * 0.15 >= 30:
        return ["[evaluation]", 'select = "best"  # release the round with the best validation score']
    return ["[evaluation]", 'select = "last"  # too few validation images to choose the best round by']


AUDIT = ["[audit]", "keep_parcels = 1  # so that `polyclinic audit RUN` can attack what left the sites"]
