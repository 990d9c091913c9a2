"""`polyclinic study new --for DIR` where DIR holds volumes: their channels, structures and hospitals by names, spacing,
patch, batch and network by nnU-Net's rules."""

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from polyclinic.data.reading import load_nifti, read_dicom
from polyclinic.data.volumes.finding import MASK_FOLDERS, MASKS, find_cases, volumes_below
from polyclinic.data.volumes.reading import NPZ, CaseFiles, dicom_slices, stem_of
from polyclinic.errors import BadInput

if TYPE_CHECKING:
    from polyclinic.models.volume_plan import VolumePlan

#: cases whose headers, and masks, are looked at
HEADERS, LOOKED_AT = 40, 8
#: slices below which a file is taken for pictures
FEWEST_SLICES = 8
FEWEST_CASES = 6
#: the air of a computed tomograph lies below it, and nothing of an MRI
NO_MRI = -200
#: the usual order of channels that many have
ORDER = ("t1", "t1n", "t1ce", "t1c", "t2", "t2w", "flair", "t2f")
SIMULATED = 3

STUDY = """\
# Written by `polyclinic study new --for`, which looked at the volumes and found:
{said}
# Run it with `polyclinic run`. docs/volumes.md says what else can be set.

format = 1
seed = 0

[data]
source = "volumes"
path = {path}  # from the folder of this file
channels = {channels}
structures = {structures}  # values of the mask; give them names
size = {size}  # of patches, in voxels: by nnU-Net's rules, as are spacing, batch and network
{preparation}

[sites]
{sites}

[task]
name = "volume-segmentation"
patches = 2  # of each case in a pass

[model]
backbone = "dynunet"
norm = "instance"
arguments = {arguments}

[optimizer]
name = "adamw"
lr = 0.001
batch_size = {batch}  # needs about {gigabytes:.0f} GB on a GPU
augment = ["flip", "rotate", "crop", "brightness", "contrast", "noise"]
schedule = "cosine"

[method]
name = "fedavg"
rounds = 50
"""
CT = """\
preparation.spacing = {spacing}
preparation.normalise = "fixed"  # CT: intensities mean the same everywhere
preparation.intensities = [{intensities}]"""
MRI = "preparation.spacing = {spacing}  # millimetres; each case is normalised by itself, as for MRI"
BY_FOLDER = 'partition = "column"  # each case stays at its hospital'
DEALT = f'partition = "iid"  # nothing says where a case was taken: they are dealt out at random\ncount = {SIMULATED}'


def volume_study_for(images: Path, path: Path, plans: Path | None = None) -> tuple[str, list[str]] | None:
    """The text of a study for the volumes of a folder, and sentences about what was found; None where there are none
    with masks, so that they are images. `plans`: an nnUNetPlans.json instead of the plan that follows from them."""
    if not images.is_dir() or not (volumes := volumes_below(images)):
        return None
    channels = channels_of(images, volumes)
    try:
        found = find_cases(images, channels, {})
    except BadInput:
        return None
    cases = [case for case in found.values() if case.mask is not None or case.archive is not None]
    facts = [fact for case in _spread(cases, HEADERS) if (fact := _header(case)) is not None]
    if not facts or np.median([shape for shape, _ in facts], axis=0).min() < FEWEST_SLICES:
        return None
    if len(cases) < FEWEST_CASES:
        raise BadInput(f"--for {images}: {len(cases)} volumes with masks are too few to train and test on; add more")
    shapes, spacings = (np.array(some, float) for some in zip(*facts, strict=True))
    looked = [one for case in _spread(cases, LOOKED_AT) if (one := _content(case)) is not None]
    values = sorted({value for mask, _, _ in looked for value in np.unique(mask).tolist()} - {0})
    from polyclinic.models.nnunet_plans import read_plans  # here: they bring torch
    from polyclinic.models.volume_plan import plan_of

    plan = read_plans(plans) if plans else plan_of(spacings, shapes * spacings)
    sites = Counter(site for site, _ in found)
    said = _said(found, channels, values, (shapes, spacings), sites)
    return _text(os.path.relpath(images, path.parent.resolve()), channels, values, plan, sites, looked, said), said


def _spread(cases: list[CaseFiles], most: int) -> list[CaseFiles]:
    """Some cases, evenly among all: those of one hospital stand together."""
    places = np.linspace(0, len(cases) - 1, min(most, len(cases))).round().astype(int)
    return [cases[place] for place in places.tolist()]


def channels_of(top: Path, volumes: list[Path]) -> list[str]:
    """The channels by the last words of names; ["image"] where names end in nothing that cases share."""
    described = top / "dataset.json"
    if described.is_file():  # nnU-Net's
        content = json.loads(described.read_text(encoding="utf-8"))
        named = content.get("channel_names") or content.get("modality") or {}
        return [re.sub(r"\W+", "-", str(name)).strip("-").lower() or key for key, name in sorted(named.items())]
    last: Counter[str] = Counter()
    for file in volumes:
        inside = {folder.lower() for folder in file.relative_to(top).parts[:-1]}
        if file.suffix.lower() != NPZ and not inside & set(MASK_FOLDERS):
            last[re.split(r"[_\-. ]", stem_of(file).lower())[-1]] += 1
    shared = [word for word, count in last.items() if count > max(last.values()) / 2 and word not in MASKS]
    if len(shared) > 16 or not shared or max(last[word] for word in shared) < 2:
        return ["image"]
    return sorted(shared, key=lambda word: (ORDER.index(word) if word in ORDER else len(ORDER), word))


def _header(case: CaseFiles) -> tuple[list[int], list[float]] | None:
    """Shape and spacing of a case by its headers; None for one that cannot be read."""
    try:
        file = case.archive or next(iter(case.channels.values()))
        if case.archive:
            with np.load(file, allow_pickle=False) as opened:
                affine = opened["affine"] if "affine" in opened.files else np.diag([*opened["spacing"], 1.0])
                return list(opened["image"].shape[-3:]), np.linalg.norm(affine[:3, :3], axis=0).tolist()
        if file.is_dir():
            slices = dicom_slices(file)
            first, last = (read_dicom(one, stop_before_pixels=True) for one in (slices[0], slices[-1]))
            apart = float(first.get("SliceThickness") or last.get("SpacingBetweenSlices") or 1)
            return [first.Columns, first.Rows, len(slices)], [*map(float, reversed(first.PixelSpacing)), apart]
        image = load_nifti(file)
        return list(image.shape[:3]), np.linalg.norm(image.affine[:3, :3], axis=0).tolist()
    except Exception:  # a case that cannot be read is named when it is prepared
        return None


def _content(case: CaseFiles) -> tuple[np.ndarray, np.ndarray, float] | None:
    """The mask of a case, some of its first channel's intensities inside it [N], and the lowest of all."""
    try:
        if case.archive:
            with np.load(case.archive, allow_pickle=False) as opened:
                mask, image = opened["mask"], opened["image"].reshape(-1, *opened["mask"].shape)[0]
        else:
            assert case.mask is not None
            first = next(iter(case.channels.values()))
            mask = np.asarray(load_nifti(case.mask).dataobj)
            image = np.zeros_like(mask) if first.is_dir() else np.asarray(load_nifti(first).dataobj)
        inside = np.asarray(image[mask > 0], np.float32)
        return mask.astype(np.uint8), inside[:: len(inside) // 20_000 + 1], float(image.min())
    except Exception:
        return None


def _said(
    found: dict[tuple[str, str], CaseFiles],
    channels: list[str],
    values: list[int],
    facts: tuple[np.ndarray, np.ndarray],
    sites: Counter[str],
) -> list[str]:
    shape, spacing = (np.median(some, axis=0) for some in facts)
    words = [
        f"{len(found)} volumes, channels {', '.join(channels)}, values of masks {', '.join(map(str, values))}",
        f"usually {' x '.join(f'{n:.0f}' for n in shape)} voxels of {' x '.join(f'{s:.2g}' for s in spacing)} mm",
    ]
    if bare := sum(case.mask is None and case.archive is None for case in found.values()):
        words.append(f"{bare} of them have no mask, and are left out")
    if len(sites) > 1:
        words.append(f"{len(sites)} hospitals by folder: {', '.join(f'{name} ({n})' for name, n in sites.items())}")
    return [*words, "a case is taken for a patient; if patients have several, set data.patient or data.table"]


def _text(
    path: str,
    channels: list[str],
    values: list[int],
    plan: "VolumePlan",
    sites: Counter[str],
    looked: list[tuple[np.ndarray, np.ndarray, float]],
    said: list[str],
) -> str:
    tables: dict[str, Any] = plan.as_tables()
    layout, spacing, window = MRI, json.dumps(tables["data"]["preparation"]["spacing"]), ""
    if len(channels) == 1 and looked and np.median([lowest for _, _, lowest in looked]) < NO_MRI:
        inside = np.concatenate([numbers for _, numbers, _ in looked])
        low, high = np.percentile(inside, (0.5, 99.5))
        mean, deviation = np.clip(inside, low, high).mean(), np.clip(inside, low, high).std()
        layout = CT
        window = f"{{ low = {low:.0f}, high = {high:.0f}, mean = {mean:.1f}, deviation = {max(deviation, 1):.1f} }}"
    arguments = ", ".join(f"{name} = {json.dumps(some)}" for name, some in tables["model"]["arguments"].items())
    structures = ", ".join(f"structure-{value} = [{value}]" for value in values)
    return STUDY.format(
        said="\n".join(f"#   {sentence}" for sentence in said),
        path=json.dumps(path),
        channels=json.dumps(channels),
        structures=f"{{ {structures} }}",
        size=json.dumps(tables["data"]["size"]),
        preparation=layout.format(spacing=spacing, intensities=window),
        sites=BY_FOLDER if len(sites) > 1 else DEALT,
        arguments=f"{{ {arguments} }}",
        batch=plan.batch_size,
        gigabytes=plan.gigabytes,
    )
