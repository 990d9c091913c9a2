"""Reads the files of a case: NIfTI, NumPy archives and folders of DICOM slices, with what can be wrong about them."""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from polyclinic.data.archives import unpacked_size
from polyclinic.data.reading import NIFTI, is_dicom, is_nifti, load_nifti, read_dicom
from polyclinic.data.volumes.volume import RawVolume, Structures

#: affines that differ by no more than this are the same: headers are rounded
SAME = 1e-2
#: the largest cosine between axes that still count as right angles
SQUARE = 1e-2
#: voxels of a file at most: 1,024 x 1,024 x 2,048
MOST_VOXELS = 2**31
NPZ = ".npz"
#: kinds of plain numbers: of truth, whole, without a sign, and others
PLAIN, NOT_PLAIN = "biuf", "it holds colours, texts or complex numbers; write one plain number for each voxel"


@dataclass(frozen=True)
class CaseFiles:
    """The files of one case: a channel each, or one archive of all; `None` is a mask that there is not."""

    name: str
    channels: Mapping[str, Path] = field(default_factory=dict)
    mask: Path | None = None
    archive: Path | None = None

    @property
    def files(self) -> list[Path]:
        found = [self.archive, *self.channels.values(), self.mask]
        return [file for file in found if file is not None]


def is_volume(path: Path) -> bool:
    """True for a file that may be a volume, by its name."""
    return not path.name.startswith(".") and (is_nifti(path) or path.suffix.lower() == NPZ)


def stem_of(path: Path) -> str:
    """The name of a file without the suffix of its format."""
    name = path.name
    found = next((end for end in sorted((*NIFTI, NPZ), key=len, reverse=True) if name.lower().endswith(end)), "")
    return name[: len(name) - len(found)]


def read_case(case: CaseFiles, channels: tuple[str, ...], structures: Structures) -> RawVolume:
    """A case with these channels; ValueError says in words what is wrong and what to do."""
    raw = _from_archive(case.archive, len(channels)) if case.archive else _from_files(case, channels)
    _check(raw, structures)
    return raw


def _from_files(case: CaseFiles, channels: tuple[str, ...]) -> RawVolume:
    if missing := [name for name in channels if name not in case.channels]:
        there = ", ".join(case.channels) or "none"
        raise ValueError(f"has no channel '{missing[0]}' (there: {there}); add its file, or leave the case out")
    first, affine = _read(case.channels[channels[0]])
    image = np.empty((len(channels), *first.shape), np.float32)
    image[0] = first
    for number, name in enumerate(channels[1:], start=1):
        image[number] = _alike(name, _read(case.channels[name]), channels[0], (first, affine))
    mask = None if case.mask is None else _alike("the mask", _read(case.mask), channels[0], (first, affine))
    return RawVolume(image, None if mask is None else _whole(mask), affine)


def _alike(
    name: str, read: tuple[np.ndarray, np.ndarray], other: str, first: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """The voxels of another file of the case, which must lie where those of its first file do."""
    (voxels, affine), (known, where) = read, first
    if voxels.shape != known.shape:
        sides = " x ".join(map(str, voxels.shape)), " x ".join(map(str, known.shape))
        raise ValueError(f"{name} has {sides[0]} voxels, and {other} has {sides[1]}; register them to the same grid")
    if not np.allclose(affine, where, atol=SAME):
        raise ValueError(f"{name} lies or is turned otherwise than {other} (affine); register them to the same grid")
    return voxels


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Voxels [X, Y, Z] of a NIfTI file or of a folder of DICOM slices, and their affine."""
    if path.is_dir():
        return _from_dicom(path)
    if not path.is_file():
        raise ValueError(f"{path.name} does not exist; bring it back")
    from nibabel import imageglobals, spatialimages

    try:
        with imageglobals.ErrorLevel(30):  # a spacing of 0 would become 1 mm
            opened = load_nifti(path)
        _check_shape(opened.shape)
        if opened.get_data_dtype().kind not in PLAIN:
            raise ValueError(NOT_PLAIN)
        voxels = np.asarray(opened.dataobj, dtype=np.float32)
    except spatialimages.HeaderDataError as error:
        raise ValueError(f"{path.name} has a wrong header, such as a spacing of 0 ({error}); correct it") from None
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    except Exception as error:  # what a decoder raises on a broken file
        raise ValueError(f"{path.name} is cut off or damaged ({type(error).__name__}); copy it again") from None
    return voxels.reshape(opened.shape[:3]), np.asarray(opened.affine, dtype=np.float64)


def _check_shape(shape: tuple[int, ...]) -> None:
    sides = tuple(shape[:3]) + tuple(side for side in shape[3:] if side != 1)
    if len(sides) != 3:
        raise ValueError(f"it has {len(sides)} dimensions instead of 3; write a file for each channel or point of time")
    if np.prod([int(side) for side in sides]) > MOST_VOXELS:
        raise ValueError(f"it declares {' x '.join(map(str, sides))} voxels, above the limit; cut it")


def _from_archive(path: Path, channels: int) -> RawVolume:
    """`image` [C, X, Y, Z] or [X, Y, Z], perhaps `mask` [X, Y, Z], and `spacing` [3] or `affine` [4, 4]."""
    try:
        with zipfile.ZipFile(path) as packed:
            too_large = unpacked_size(packed) > 8 * (channels + 1) * MOST_VOXELS
        if too_large:
            raise ValueError("it unpacks to more than any volume has")
        with np.load(path, allow_pickle=False) as opened:
            arrays = {name: opened[name] for name in opened.files}
    except Exception as error:  # what NumPy raises on a broken archive
        raise ValueError(f"is cut off or damaged ({type(error).__name__}); copy it again") from None
    if "image" not in arrays or not {"spacing", "affine"} & arrays.keys():
        raise ValueError("needs the arrays image and spacing (or affine); add them")
    if any(arrays[name].dtype.kind not in PLAIN for name in ("image", "mask", "spacing", "affine") if name in arrays):
        raise ValueError(NOT_PLAIN)
    image = np.asarray(arrays["image"], np.float32)
    image = image[None] if image.ndim == 3 else image
    if image.ndim != 4 or len(image) != channels:
        raise ValueError(f"has an image of shape {list(image.shape)}, which is not {channels} channels of 3 dimensions")
    affine = arrays["affine"] if "affine" in arrays else np.diag([*np.ravel(arrays["spacing"])[:3], 1.0])
    mask = arrays.get("mask")
    if mask is not None and mask.shape != image.shape[1:]:
        raise ValueError(f"has a mask of shape {list(mask.shape)} for volumes of {list(image.shape[1:])}")
    return RawVolume(image, None if mask is None else _whole(mask), np.asarray(affine, np.float64))


def _whole(mask: np.ndarray) -> np.ndarray:
    if (
        not mask.size
        or not np.isfinite(mask).all()
        or (mask != np.round(mask)).any()
        or mask.min() < 0
        or mask.max() > 255
    ):
        raise ValueError("the mask holds values that are no whole numbers from 0 to 255; write one for each structure")
    return mask.astype(np.uint8)


def _check(raw: RawVolume, structures: Structures) -> None:
    """ValueError for no voxels, numbers that are none, axes without length or right angles, and unknown structures."""
    if not raw.image.any():
        raise ValueError("is 0 everywhere, or has no voxels; export it again, or leave it out")
    if not np.isfinite(raw.image).all():
        raise ValueError("holds values that are not numbers (NaN or infinite); replace them, by 0 outside the body")
    axes = raw.affine[:3, :3] if raw.affine.shape == (4, 4) else np.zeros((3, 3))
    lengths = np.linalg.norm(axes, axis=0)
    if not np.isfinite(raw.affine).all() or lengths.min() <= 0:
        raise ValueError("has a spacing of 0 mm, or none; correct its header")
    cosines = np.abs((axes / lengths).T @ (axes / lengths) - np.eye(3))
    if cosines.max() > SQUARE:
        raise ValueError("has a sheared affine (axes without right angles); resample it to a straight grid")
    if raw.mask is not None and structures:
        known = {0, *(value for values in structures.values() for value in values)}
        if unknown := sorted(set(np.unique(raw.mask).tolist()) - known):
            raise ValueError(f"the mask has the value {unknown[0]}, which data.structures does not name; add it there")


# --- DICOM ----------------------------------------------------------------------------------------------------


def dicom_slices(folder: Path) -> list[Path]:
    """The DICOM files that lie in a folder itself."""
    return sorted(path for path in folder.iterdir() if path.is_file() and is_dicom(path))


def _from_dicom(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """One series, by MONAI, which rescales and orders its slices; ValueError where it has gaps or is not one."""
    from monai.data import PydicomReader

    files = dicom_slices(folder)
    tags = ["SeriesInstanceUID", "ImageOrientationPatient", "ImagePositionPatient", "PixelSpacing"]
    try:
        headers = [read_dicom(file, stop_before_pixels=True, specific_tags=tags) for file in files]
    except Exception as error:
        raise ValueError(f"{folder.name} holds a damaged slice ({type(error).__name__}); export it again") from None
    _check_series(folder, headers)
    reader = PydicomReader()
    voxels, facts = reader.get_data(reader.read(str(folder)))
    affine = np.asarray(facts["affine"], np.float64)
    flip = np.diag([-1.0, -1.0, 1.0, 1.0]) if str(facts.get("space", "RAS")).endswith("LPS") else np.eye(4)
    return np.asarray(voxels, np.float32), flip @ affine


def _check_series(folder: Path, headers: list[Any]) -> None:
    """ValueError unless the slices are those of one series, evenly spaced, none missing and none twice."""
    series = sorted({str(header.get("SeriesInstanceUID", "")) for header in headers})
    if len(series) > 1:
        raise ValueError(f"{folder.name} holds {len(series)} series ({', '.join(series[:3])}); make a folder for each")
    known = [header for header in headers if header.get("ImagePositionPatient") and header.get("PixelSpacing")]
    if not headers or len(known) < len(headers):
        raise ValueError(f"{folder.name} has slices without a position or spacing; export the series again")
    across = np.array(headers[0].ImageOrientationPatient, float).reshape(2, 3)
    heights = np.sort([np.dot(np.cross(*across), np.array(one.ImagePositionPatient, float)) for one in headers])
    steps = np.diff(heights)
    if len(steps) and steps.min() < SAME:
        raise ValueError(f"{folder.name} has two slices at {heights[steps.argmin()]:.1f} mm; remove one of them")
    if len(steps) and steps.max() > 1.5 * steps.min():
        raise ValueError(f"{folder.name} lacks slices after {heights[steps.argmax()]:.1f} mm; export the series again")
