"""Predicted masks in the images' own size, as PNG, NIfTI with the affine of the volume, or DICOM SEG."""

import gzip
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from polyclinic import __version__
from polyclinic.data.pixels import Shape
from polyclinic.data.reading import is_dicom, is_nifti, load_nifti, open_nifti, read_dicom
from polyclinic.errors import BadInput, Notice
from polyclinic.files import atomic_file, atomic_write

if TYPE_CHECKING:
    from polyclinic.runner.predict.predict import Prediction

Array = np.ndarray[Any, Any]
SLICE_ENDING = re.compile(r"-\d{4}$")  #: of the name of a slice's mask


def in_own_size(map_: Array, shape: Sequence[int], fitted: Shape) -> Array:
    """A map [size, size] of a prepared image as a map [H, W] of the image as it lies on disk: `fit_image` undone.

    Where preparation cut something off, the map is 0: the network has not seen it.
    """
    height, width = shape[:2]
    if fitted == "squash" or height == width:
        return _resized(map_, height, width)
    side = min(height, width) if fitted == "crop" else max(height, width)
    square = _resized(map_, side, side)
    above, left = abs(side - height) // 2, abs(side - width) // 2
    if fitted == "pad":
        return square[above : above + height, left : left + width]
    whole = np.zeros((height, width), square.dtype)
    whole[above : above + side, left : left + side] = square
    return whole


def _resized(map_: Array, height: int, width: int) -> Array:
    if map_.shape == (height, width):
        return map_
    picture = Image.fromarray(np.ascontiguousarray(map_, dtype=np.float32))
    return np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))


def write_masks(found: "Sequence[Prediction]", folder: Path) -> list[Path]:
    """Write one mask file for each image file, with its name; a number stands before names that two of them share.

    NIfTI for NIfTI, DICOM SEG for DICOM where highdicom is installed, else PNG, one for each slice. BadInput where the
    folder holds the images themselves: a mask would take the place of its image.
    """
    of_file: dict[Path, list[Prediction]] = {}
    for one in found:
        of_file.setdefault(one.file, []).append(one)
    if any(file.parent.resolve() == folder.resolve() for file in of_file):
        raise BadInput(f"--masks {folder}: the images lie there, and masks have their names; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    return [
        path
        for (file, masks), name in zip(of_file.items(), _names(list(of_file)), strict=True)
        for path in _write(file, masks, folder / name)
    ]


def _names(files: Sequence[Path]) -> list[str]:
    """Names of masks without a suffix, all different, also from those of single slices (NAME-0001)."""
    stems = [_stem(file) for file in files]
    counts = Counter(stem.casefold() for stem in stems)

    def is_shared(stem: str) -> bool:
        volume = SLICE_ENDING.sub("", stem.casefold())
        return counts[stem.casefold()] > 1 or (volume != stem.casefold() and volume in counts)

    return [f"{number:05d}-{stem}" if is_shared(stem) else stem for number, stem in enumerate(stems, 1)]


def _write(file: Path, masks: "Sequence[Prediction]", target: Path) -> list[Path]:
    if is_nifti(file):
        return [_write_nifti(file, masks, target.with_name(target.name + ".nii.gz"))]
    if is_dicom(file) and find_spec("highdicom") is not None:
        try:
            return [_write_dicom_seg(file, masks, target.with_name(target.name + ".dcm"))]
        except Exception as error:  # highdicom wants facts of the header that some files lack
            reason = " ".join(str(error).split())[:200]
            warnings.warn(f"{file}: no DICOM SEG can be written ({reason}); a PNG is", Notice, stacklevel=2)
    written = []
    for one in masks:
        assert one.mask is not None
        name = f"{target.name}-{one.frame:04d}.png" if len(masks) > 1 else f"{target.name}.png"
        written.append(target.with_name(name))
        with atomic_file(written[-1]) as partial:
            Image.fromarray(one.mask.astype("uint8") * 255).save(partial, format="PNG")
    return written


def _stem(file: Path) -> str:
    return file.name.removesuffix(".gz").rpartition(".")[0] or file.name


def _write_nifti(file: Path, masks: "Sequence[Prediction]", path: Path) -> Path:
    """The masks of a volume's slices as a volume of the same shape and affine; other slices are 0."""
    import nibabel

    image = open_nifti(file)
    on_disk = load_nifti(file)  # of two dimensions, where it is one slice
    turn = nibabel.io_orientation(image.affine)  # from the file's voxels to those that `reading.axial` shows
    shape = nibabel.apply_orientation(np.empty(image.shape, bool), turn).shape
    canonical = np.zeros(shape, np.uint8)
    for one in masks:
        assert one.mask is not None
        frame = shape[2] // 2 if one.frame is None else one.frame
        canonical[:, :, frame] = one.mask.T[::-1, ::-1]
    back = nibabel.orientations.ornt_transform([[0, 1], [1, 1], [2, 1]], turn)
    voxels = nibabel.apply_orientation(canonical, back).reshape(on_disk.shape)
    atomic_write(path, gzip.compress(nibabel.Nifti1Image(voxels, on_disk.affine).to_bytes(), mtime=0))
    return path


def _write_dicom_seg(file: Path, masks: "Sequence[Prediction]", path: Path) -> Path:
    """A binary DICOM segmentation that refers to the image."""
    source = read_dicom(file)
    frames = int(source.get("NumberOfFrames") or 1)
    pixels = np.zeros((frames, source.Rows, source.Columns, 1), np.uint8)
    for one in masks:
        assert one.mask is not None
        pixels[frames // 2 if one.frame is None else one.frame, :, :, 0] = one.mask
    return save_dicom_seg([source], pixels, ["predicted mask"], path)


def save_dicom_seg(sources: Sequence[Any], pixels: Array, names: Sequence[str], path: Path) -> Path:
    """A binary DICOM segmentation of frames uint8 [N, rows, columns, K], with a segment of each name, which refers to
    one image of N frames or to N slices."""
    import highdicom
    from pydicom.sr.codedict import codes

    drawn = [
        highdicom.seg.SegmentDescription(
            segment_number=number,
            segment_label=name[:64],
            segmented_property_category=codes.SCT.MorphologicallyAbnormalStructure,
            segmented_property_type=codes.SCT.Lesion,
            algorithm_type=highdicom.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
            algorithm_identification=highdicom.AlgorithmIdentificationSequence(
                name="polyclinic", version=__version__, family=codes.DCM.ArtificialIntelligence
            ),
        )
        for number, name in enumerate(names, start=1)
    ]
    found = highdicom.seg.Segmentation(
        source_images=list(sources),
        pixel_array=pixels,
        segmentation_type=highdicom.seg.SegmentationTypeValues.BINARY,
        segment_descriptions=drawn,
        series_instance_uid=highdicom.UID(),
        series_number=1,
        sop_instance_uid=highdicom.UID(),
        instance_number=1,
        manufacturer="Polyclinic",
        manufacturer_model_name="polyclinic predict",
        software_versions=__version__,
        device_serial_number="0",
        omit_empty_frames=False,
    )
    with atomic_file(path) as partial:
        found.save_as(partial)
    return path
