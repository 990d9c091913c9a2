"""Finds the cases of a folder by the names of its files: channels, masks, institutions."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polyclinic.data.reading import is_dicom
from polyclinic.data.volumes.reading import NPZ, CaseFiles, is_volume, stem_of
from polyclinic.errors import BadInput

#: last words of names of masks, and folders that hold nothing else
MASKS = ("seg", "mask", "label", "labels", "segmentation")
MASK_FOLDERS = ("labelstr", "labelsts", "labels", "masks", "segmentations")
#: folders that stand for no institution
PLAIN_FOLDERS = (*MASK_FOLDERS, "imagestr", "imagests", "images", "volumes", "data", "train", "training")


@dataclass
class _Found:
    channels: dict[str, Path] = field(default_factory=dict)
    mask: Path | None = None
    archive: Path | None = None


def find_cases(top: Path, channels: Sequence[str], other_names: Mapping[str, str]) -> dict[tuple[str, str], CaseFiles]:
    """The cases below a folder, by institution ("" where no folder says it) and name, in the order of both.

    A file is CASE_CHANNEL.nii.gz, CASE/CHANNEL.nii.gz, CASE_0000.nii.gz (nnU-Net's numbers of channels), CASE.npz, or a
    folder of DICOM slices of such a name. `other_names` of channels are what data sets call them.
    """
    words = {name.lower(): name for name in channels} | {word.lower(): name for word, name in other_names.items()}
    words |= {f"{number:04}": name for number, name in enumerate(channels)} | dict.fromkeys(MASKS, "")
    ending = re.compile(rf"^(?:(.*)[_\-. ])?({'|'.join(map(re.escape, words))})$", re.IGNORECASE)
    found: dict[tuple[str, str], _Found] = {}
    for path in volumes_below(top):
        stem, folders = stem_of(path), list(path.relative_to(top).parts[:-1])
        only_masks = any(folder.lower() in MASK_FOLDERS for folder in folders)
        matched = None if path.suffix.lower() == NPZ or only_masks else ending.match(stem)
        kind = words[matched[2].lower()] if matched else stem if len(channels) > 1 else channels[0]
        name = (matched[1] or "") if matched else stem
        if matched and not name:
            name = folders[-1] if folders else stem
        sites = [folder for folder in folders if folder.lower() not in PLAIN_FOLDERS and folder != name]
        case = found.setdefault((sites[0] if sites else "", name), _Found())
        if path.suffix.lower() == NPZ:
            case.archive = path
        elif only_masks or not kind:
            case.mask = _only(case.mask, path)
        else:
            case.channels[kind] = _only(case.channels.get(kind), path)
    if len({site for site, _ in found}) == 1:  # a folder around all of them
        found = {("", name): case for (_, name), case in found.items()}
    return {key: CaseFiles(key[1], one.channels, one.mask, one.archive) for key, one in sorted(found.items())}


def volumes_below(top: Path) -> list[Path]:
    """Files that may be volumes, and folders that hold DICOM slices, at any depth, in the order of their names."""
    found: list[Path] = []
    for place, _, names in sorted(os.walk(top)):
        folder = Path(place)
        files = [folder / name for name in sorted(names)]
        volumes = [file for file in files if is_volume(file)]
        others = [file for file in files if not file.name.startswith(".") and file not in volumes]
        found += volumes if volumes or not (others and is_dicom(others[0])) else [folder]
    return found


def _only(known: Path | None, path: Path) -> Path:
    if known is not None:
        raise BadInput(f"data.path: '{known}' and '{path}' are the same part of one case; rename or remove one of them")
    return path
