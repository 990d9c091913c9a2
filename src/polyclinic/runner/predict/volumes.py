"""Prediction of whole volumes: prepared as in training, seen through a sliding window, masks in the case's own grid."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from polyclinic.data.datasets.volume_folder import Fets
from polyclinic.data.reading import read_dicom
from polyclinic.data.volumes.finding import find_cases
from polyclinic.data.volumes.reading import NPZ, CaseFiles, dicom_slices, read_case, stem_of
from polyclinic.data.volumes.volume import Structures
from polyclinic.errors import BadInput, Notice
from polyclinic.extras import need
from polyclinic.files import atomic_file
from polyclinic.runner.predict.masks import save_dicom_seg
from polyclinic.tasks.volume_segmentation import overlapping
from polyclinic.training.volumes import window

if TYPE_CHECKING:
    from polyclinic.data.volumes.volume import RawVolume
    from polyclinic.runner.predict.predict import Prediction, Predictor

CUBIC_MM = 1000.0  #: in a millilitre


def predict_volumes(
    predictor: "Predictor", paths: Iterable[Path], on_bad_file: Callable[[Path, str], None] | None
) -> "Iterator[Prediction]":
    """A mask for each case of folders and archives, in the case's own grid, and millilitres of each structure."""
    from polyclinic.runner.predict.predict import Prediction

    volume = predictor.card.volume
    assert volume is not None
    for case in _cases(paths, volume.channels):
        file = case.files[0]
        try:
            raw = read_case(CaseFiles(case.name, case.channels, None, case.archive), volume.channels, {})
            mask = mask_of(predictor, raw)
        except (ValueError, OSError, RuntimeError, MemoryError) as error:
            reason = f"case {case.name}: {' '.join(str(error).split())[:300]}"
            if on_bad_file is None:
                raise BadInput(f"{file}: {reason}") from None
            on_bad_file(file, reason)
            continue
        voxel = float(np.prod(raw.spacing)) / CUBIC_MM
        inside = {f"{name} (ml)": np.isin(mask, values).sum() * voxel for name, values in volume.structures.items()}
        values: dict[str, Any] = {"case": case.name, **{name: round(float(ml), 3) for name, ml in inside.items()}}
        yield Prediction(file, None, values, mask, affine=raw.affine)


def _cases(paths: Iterable[Path], channels: Sequence[str]) -> Iterator[CaseFiles]:
    names = Fets.other_names if set(channels) == set(Fets.other_names.values()) else {}
    for path in paths:
        if not path.exists():
            raise BadInput(f"{path}: there is no such file or folder; name folders of volumes, or archives")
        if path.is_dir():
            found = [case for case in find_cases(path, channels, names).values() if case.channels or case.archive]
            if not found:
                raise BadInput(f"{path}: holds no volume that can be read; docs/volumes.md says how they must lie")
            yield from found
        elif path.suffix.lower() == NPZ:
            yield CaseFiles(stem_of(path), archive=path)
        elif len(channels) == 1:
            yield CaseFiles(stem_of(path), {channels[0]: path})
        else:
            raise BadInput(f"{path}: is one channel of {len(channels)}; name the folder of the case")


@torch.no_grad()
def mask_of(predictor: "Predictor", raw: "RawVolume") -> np.ndarray:
    """The values of the mask of a case, uint8 [X, Y, Z]: probabilities are resampled to its grid, and then decided."""
    card, task, target = predictor.card, predictor.task, predictor.card.target
    assert card.volume is not None
    assert not isinstance(card.size, int)
    prepared, back = card.volume.preparation.prepared_and_back(raw)
    image = torch.from_numpy(prepared.image.astype(np.float32))[None]
    regions, found = overlapping(target), None
    for network in predictor.model.networks:
        output: Tensor = window(tuple(card.size), getattr(task, "overlap", 0.5))(image, network)
        shares = output.sigmoid() if regions else output.softmax(1)
        found = shares if found is None else found + shares
    assert found is not None
    shares = back(found[0] / len(predictor.model.networks))
    return values_of(inside_of(shares.numpy(), regions), card.volume.structures)


def inside_of(shares: np.ndarray, regions: bool) -> np.ndarray:
    """Which voxels belong to each structure, bool [K, X, Y, Z], from shares [K or 1 + K, X, Y, Z]."""
    if regions:
        return shares > 0.5
    chosen = shares.argmax(0) == np.arange(1, len(shares))[:, None, None, None]
    return chosen & (shares.max(0) > 0)  # what preparation cut off has no share of anything


def values_of(inside: np.ndarray, structures: Mapping[str, Sequence[int]]) -> np.ndarray:
    """Structures bool [K, X, Y, Z] as one mask: in each voxel the value whose structures are most alike."""
    codes = sum(one.astype(np.int64) << place for place, one in enumerate(inside))
    members = {0: 0}
    for place, values in enumerate(structures.values()):
        for value in values:
            members[value] = members.get(value, 0) | 1 << place
    known, where = np.unique(codes, return_inverse=True)
    best = [min(members, key=lambda value: ((members[value] ^ int(code)).bit_count(), value)) for code in known]
    return np.array(best, np.uint8)[where].reshape(inside.shape[1:])


def write_volume_masks(found: "Sequence[Prediction]", folder: Path, structures: Structures) -> list[Path]:
    """A NIfTI file of each mask, by the name of its case, or DICOM SEG for a series of DICOM slices where highdicom is
    installed; a number stands before names that two of them share."""
    if any(folder.resolve() in (one.file.resolve(), *one.file.resolve().parents) for one in found):
        raise BadInput(f"--masks {folder}: the volumes lie there, and masks have their names; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    names = [str(one.values["case"]) for one in found]
    written = []
    for number, (one, name) in enumerate(zip(found, names, strict=True), start=1):
        target = folder / f"{f'{number:05d}-' if names.count(name) > 1 else ''}{name}"
        written.append(_write_mask(one, target, structures))
    return written


def _write_mask(one: "Prediction", target: Path, structures: Structures) -> Path:
    import nibabel

    assert one.mask is not None
    assert one.affine is not None
    if one.file.is_dir():
        try:
            need("highdicom", "DICOM SEG")
            slices = [read_dicom(file) for file in dicom_slices(one.file)]
            frames = frames_of(one.mask, one.affine, slices)
            segments = np.stack([np.isin(frames, values) for values in structures.values()], -1).astype(np.uint8)
            return save_dicom_seg(slices, segments, list(structures), target.with_name(f"{target.name}.dcm"))
        except Exception as error:  # highdicom wants facts of the headers that some files lack
            reason = " ".join(str(error).split())[:200]
            warnings.warn(f"{one.file}: NIfTI is written instead of DICOM SEG ({reason})", Notice, stacklevel=2)
    path = target.with_name(f"{target.name}.nii.gz")
    with atomic_file(path) as partial:
        whole = partial.with_name(partial.name + ".nii.gz")
        nibabel.save(nibabel.Nifti1Image(one.mask, one.affine), whole)
        whole.replace(partial)
    return path


def frames_of(mask: np.ndarray, affine: np.ndarray, slices: Sequence[Any]) -> np.ndarray:
    """A mask [X, Y, Z] as the pixels [N, rows, columns] of DICOM slices, in their order, found by their positions."""
    place = np.linalg.inv(affine)
    found = []
    for header in slices:
        corner = np.array([*header.ImagePositionPatient, 1.0], float) * (-1, -1, 1, 1)
        found.append(mask[:, :, round(float((place @ corner)[2]))].T)
    return np.stack(found)
