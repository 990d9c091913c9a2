"""`polyclinic study new --for DIR`: a study for somebody's own images, with the reason of each choice beside it."""

import json
import os
import re
from pathlib import Path
from statistics import median

from polyclinic.data.allowed_paths import first_outside
from polyclinic.data.datasets.folder import images_below
from polyclinic.data.survey import PATIENT, by_name, survey
from polyclinic.data.survey_cases import Hints, Survey
from polyclinic.data.survey_folders import like_names
from polyclinic.errors import BadInput
from polyclinic.files import atomic_write

SITES = 3  #: simulated ones, where the images do not say where they were taken
#: of the prepared images, at most. With the encoder and as many numbers as a study gets, images of 128 px had an AUC of
#: .820, .801 and .916 at their own size and .823, .831 and .888 at this one (eyes, brains, drawn eyes)
SIDE = 64
FEW_IMAGES = 5000  #: up to so many, a network that has seen other images already is better than one that has not
FEWEST_AT_A_SITE = 2  #: images, of which a site trains on one and tests on the other
FEW_AT_A_SITE = 10  #: images of a site, below which the study says so
TRAINED = 0.65  #: share of the images that are trained on
FEWEST_SUMMED = 3  #: sites of a secure sum: of two, each would see the other's part
RARE = 15  #: images of a class at a site, below which a usual policy (min_cohort = 10) lets no sum over it out
UNEVEN = 0.5  #: of an even share of the images, below which the rarest class makes classes count the same
STEPS = 10  #: of a site in a round, at least
FEATURES = 1024  #: of an image, by the encoder
UNIT = re.compile(r"_(months|years|days|mm)$", re.I)  #: at the end of a column's name
#: what is said of a range that the images' labels have, and not somebody who knows which values are possible
RANGE_TELLS = (
    "TAKEN FROM YOUR DATA: write the range that is possible; between real hospitals these two numbers would tell the "
    "youngest and the oldest patient"
)
#: what is said where nothing names patients
NO_PATIENTS = "no patients found: two images of one patient may fall on both sides of the split; name"
#: names of settings by what a column of a table holds
COLUMNS = {"path": "image", **{name: name for name in ("label", "mask", "site", "split", "patient")}}
USUAL = ("images", "labels", "masks", "split")  #: arrays of an archive that a study finds by these names

FOUND_SITES = """\
[sites]
partition = "column"  # each image stays at the site that it was taken at"""
NO_SITES = """\
[sites]
partition = "iid"  # nothing says where an image was taken: they are dealt out at random{hint}
count = {sites}  # simulated sites"""
#: few images: a head on a network that others have trained
HEAD = """\
[model]
backbone = "efficientnet-lite0-{features}"  # a network with public weights, which nobody trains: only \
its last layer is fitted

[optimizer]
{optimizer}

[method]
{method}
{federation}
[evaluation]
every = 0  # the last round is released: scores of validation images would choose nothing
select = "last\""""
#: one round, where no class is rare
SUMS = """\
name = "{name}"  # {images} images are few: one round, in which each site sends sums of its features{rule}
# so few numbers of an image that the sums hardly tell who is in them; more are better, and tell more: audit the run
numbers = {numbers}"""
RULE = '\nrule = "fisher"  # classes differ in size: each counts the same'
#: many small steps of the head, where sums over a rare class would be those of single patients
OF_HEAD = """\
name = "adamw"
lr = 0.003
batch_size = {batch}
balanced_batches = true  # as many of each class, as some are rare"""
STEPS_OF_HEAD = """\
name = "fedavg"  # a site has fewer than {rare} images of a class, and sums over these would be close to single images
rounds = 20
local_epochs = 2"""
SECURE = """
[federation]
sum = "secure"  # the coordinator sees what all sites send together, and no site's own
"""
ALONE = """
# fewer than three sites cannot hide in a sum: what each sends, the coordinator sees
[policy]
scores = "coarse"  # as they leave a hospital's kit: of no fewer than ten images
"""
MASKS = """\
[model]
backbone = "unet-efficientnet-lite0"  # it finds masks
weights = "public"  # it has seen other images already, which helps where there are few"""
MANY = """\
[model]
backbone = "resnet18"  # enough images to train a network from nothing"""
#: follows either
TRAINING = """
[optimizer]
name = "adamw"
lr = 0.001
batch_size = {batch}  # the smallest site takes about {steps} step{s} in a pass

[method]
name = "fedavg"  # the usual first method; `polyclinic compare --methods standalone,fedavg,centralized` says what it \
gains
rounds = {rounds}{passes}

[evaluation]
select = {select}"""
AUDIT = """\
[audit]
keep_parcels = 1  # so that `polyclinic audit RUN` can attack what left the sites
"""


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
    found = survey(images, ignore=table if force else None, hints=hints)
    if found.images < FEWEST_AT_A_SITE * SITES:
        few = "1 image is" if found.images == 1 else f"{found.images} images are"
        raise BadInput(f"--for {images}: {few} too few to train, validate and test at {SITES} sites; add more")
    found = by_name(found, "site", hints.site) if hints.site else found
    found = by_name(found, "patient", hints.patient) if hints.patient else found
    said = [_what(found), *found.notes, *_warnings(found)]
    names = [name for name in ("path", "mask") if found.table is not None and name in found.table.fields]
    listed = [found.table.folder / row[name] for row in found.table.rows for name in names] if found.table else []
    if found.cases is not None:
        if table.exists() and table.resolve() == found.path.resolve():
            raise BadInput(f"{table}: is the table that --for reads; name another study, so that it stays as it is")
        if table.exists() and not force:
            raise BadInput(f"{table}: exists already; --force writes it anew, or name another study")
        atomic_write(table, found.cases.as_csv(table.parent.resolve()))
        mend = f"to change a row, change {found.path.name if found.path.is_file() else 'the files'}"
        said.append(f"wrote {table}, which lists them; {mend}, then write both anew with --force")
        text = _text(found, table.name, said, outside=first_outside(listed, table.parent) is not None)
    else:
        folder, files = found.path.parent, listed
        if found.source == "folder":
            folder, files = found.path, images_below(found.path)
        outside = first_outside(files, folder) is not None
        text = _text(found, os.path.relpath(found.path, path.parent.resolve()), said, outside=outside)
    return text, [*said, *([f"label_range: {RANGE_TELLS}"] if found.labels.bounds else [])]


def _warnings(found: Survey) -> list[str]:
    """Sentences that somebody should know before the first run."""
    where = "an array patient" if found.source == "npz" else "a column patient, or give --patient REGEX"
    patients = [] if found.patients else [f"{NO_PATIENTS} {where}"]
    sites = found.sites if len(found.sites) > 1 else {"each of three simulated ones": found.images // SITES}
    few = {name: count for name, count in sites.items() if count < FEW_AT_A_SITE}
    small = f"with fewer than {FEW_AT_A_SITE} images train on very little, and may have no validation or test image"
    return [*patients, *([f"sites {small}: {_counts(few)}"] if few else []), *like_names(found.sites)]


def _what(found: Survey) -> str:
    """The images in one sentence."""
    words = f"{len(found.labels.classes)} classes ({_counts(found.labels.classes)})"
    if found.task != "classification":
        words = "values from {:g} to {:g}".format(*found.labels.bounds) if found.labels.bounds else "masks"
    who = f", {found.patients} patients" if found.patients else ""
    where = f", {len(found.sites)} sites ({_counts(found.sites)})" if found.sites else ""
    return f"{found.images} images of {found.sizes}, {words}{who}{where}"


def _counts(counts: dict[str, int], most: int = 6) -> str:
    named = [f"{name}: {count}" for name, count in list(counts.items())[:most]]
    return ", ".join([*named, *(["..."] if len(counts) > most else [])])


# --- the study ------------------------------------------------------------------------------------------


def _text(found: Survey, path: str, said: list[str], *, outside: bool) -> str:
    head = ["# Written by `polyclinic study new --for`, which looked at the images and found:"]
    head += [f"#   {sentence}" for sentence in said]
    head += ["# Run it with `polyclinic run`. `polyclinic study new` without --for shows every setting there is."]
    hint = "\n# if names of files say it: study new --for DIR --site REGEX --force" if found.source != "npz" else ""
    sites = FOUND_SITES if len(found.sites) > 1 else NO_SITES.format(hint=hint, sites=SITES)
    task = f'[task]\nname = "{found.task}"'
    data = "\n".join(_data(found, path, outside))
    return "\n\n".join(["\n".join(head), "format = 1\nseed = 0", data, sites, task, _training(found), AUDIT])


def _data(found: Survey, path: str, outside: bool) -> list[str]:
    """The lines of the table `[data]`, with a reason beside each choice."""
    smallest = found.sizes.smallest_side or SIDE
    side = max(28, min(SIDE, smallest // 16 * 16)) if smallest >= 32 else 28  # what the images have, in sixteens
    larger = "; more takes longer, and may be better" if found.sizes.smallest_side > side else ""
    names = {field: field for field in found.cases.fields} if found.cases else found.columns
    columns = {COLUMNS[field]: column for field, column in names.items() if field in COLUMNS}
    if found.source != "csv":
        columns = {what: name for what, name in found.columns.items() if what not in USUAL or what != name}
    lines = [
        "[data]",
        f"source = {json.dumps(found.source)}",
        f"path = {json.dumps(path)}  # from the folder of this file",
        f"size = {side}  # the images have {found.sizes}{larger}",
    ]
    if found.sizes.oblong:
        how = f'made square of {side} x {side} px; "pad" keeps proportions, "crop" cuts off the ends'
        lines.append(f'shape = "squash"  # {how}')
    lines += [f"{setting} = {json.dumps(name)}" for setting, name in columns.items() if found.source != "folder"]
    if found.keeps_classes:
        classes = ", ".join(json.dumps(name, ensure_ascii=False) for name in found.labels.classes)
        lines.append(f"keep = {{ {json.dumps(found.columns['labels'])} = [{classes}] }}  # the others have no label")
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
    return [*lines, *(["allow_outside = true  # the table lists images that lie outside of its folder"] * outside)]


def _training(found: Survey) -> str:
    """Model, optimizer, method and evaluation; so few images in a batch that the smallest site takes ten steps."""
    counts = list(found.sites.values()) if len(found.sites) > 1 else [found.images // SITES]
    smallest = int(TRAINED * min(counts))
    batch = max(4, min(32, 2 ** max(0, (smallest // STEPS).bit_length() - 1)))
    masks = found.task == "segmentation"
    if not masks and found.images <= FEW_IMAGES:
        return _head(found, smallest, batch)
    steps = max(1, smallest // batch)
    best = '"best"  # release the round with the best validation score'
    last = '"last"  # too few validation images to choose the best round by'
    training = TRAINING.format(
        batch=batch,
        steps=steps,
        s="s" * (steps > 1),
        rounds=8 if masks else 20,
        passes=_passes(median(counts), batch),
        select=best if found.images * 0.15 >= 30 else last,
    )
    return f"{MASKS if masks else MANY}\n{training}"


def _head(found: Survey, smallest: int, batch: int) -> str:
    """A head on features of a public encoder, by a method that a usual policy lets run. The rules were chosen on five
    sets of real images (lungs, eyes, skin), and no further set was kept apart to show them on."""
    sites, classes = len(found.sites) if len(found.sites) > 1 else SITES, found.labels.classes
    optimizer = f"batch_size = {batch}  # for methods that train step by step, if you try one"
    trained = int(TRAINED * found.images)
    if classes and found.rarest < RARE:
        optimizer = OF_HEAD.format(batch=max(16, batch))
        method = STEPS_OF_HEAD.format(rare=RARE)
    else:
        uneven = bool(classes) and min(classes.values()) < UNEVEN * found.images / len(classes)
        known = trained if sites >= FEWEST_SUMMED else smallest
        numbers = min(numbers_for(known), max(8, smallest - 1))
        name, rule = ("gaussian-heads", RULE) if uneven else ("analytic", "")
        method = SUMS.format(name=name, images=found.images, rule=rule, numbers=numbers)
    federation = SECURE if sites >= FEWEST_SUMMED else ALONE
    return HEAD.format(features=FEATURES, optimizer=optimizer, method=method, federation=federation)


def numbers_for(images: int) -> int:
    """Numbers of an image (method.numbers) whose sums of products over so many images hardly tell who is in them: a
    second-moments attack had areas of .52 to .59 on five sets of images, and of .56 to .67 with three times as many."""
    return max(8, min(FEATURES, round((0.16 * images) ** (2 / 3) / 8) * 8))


def _passes(images: float, batch: int) -> str:
    """Passes of a site in a round, where one pass has too few steps to learn anything. The site of middle size sets
    the pace: all sites make as many passes, so that a very small one would make the large ones slow."""
    passes = -(-STEPS // max(1, int(TRAINED * images) // batch))
    line = f"\nlocal_epochs = {passes}  # passes in a round: a site of middle size takes about {STEPS} steps"
    return line if passes > 1 else ""
