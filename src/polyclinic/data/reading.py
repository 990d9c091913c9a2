"""Image readers: PNG, JPEG, TIFF and similar; DICOM with windowing; NIfTI slice by slice."""

import gzip
import io
import math
import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from polyclinic.data.pixels import FORMATS, MOST_HEADER, MOST_PIXELS, check_picture, check_pixels, to_uint8

if TYPE_CHECKING:
    import pydicom  # it and nibabel are imported where they are used: every process of a run would pay for them

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".ppm", ".pgm")
DICOM = (".dcm", ".dicom", ".ima")
NIFTI = (".nii", ".nii.gz")

#: which slices of a volume: the middle one, all, or these (negative numbers count from the end)
Slices = Literal["middle", "all"] | tuple[int, ...]
#: centre and width of the intensities that become black to white
Window = tuple[float, float]
#: bytes of a compressed frame that are not pixels: its tables, its colours
LONGEST_TABLES = 2**20
UNKNOWN_SPACING = (math.nan, math.nan)


@dataclass(frozen=True)
class Reader:
    """Reads files as pixels: the window of DICOM and NIfTI intensities, the slices taken of a volume."""

    window: Window | None = None
    slices: Slices = "middle"
    #: of one image, by what its file declares; see `pixels.check_pixels`
    max_pixels: int = MOST_PIXELS

    def frames(self, file: Path) -> tuple[int | None, ...]:
        """The slices to take of a file; None stands for the only image, or the middle slice."""
        if not is_volume_name(file) or self.slices == "middle":
            return (None,)
        return tuple(range(count_slices(file))) if self.slices == "all" else self.slices

    def pixels(self, file: Path, frame: int | None = None) -> np.ndarray:
        """uint8 [H, W] or [H, W, 3]."""
        _refuse_missing_or_empty(file)
        if is_nifti(file):
            volume, (low, high) = load_volume(file, self.max_pixels)
            if self.window is not None:
                low, high = self.window[0] - self.window[1] / 2, self.window[0] + self.window[1] / 2
            return window_to_uint8(axial(volume, frame), low, high)
        if is_dicom(file):
            return _dicom_frame(file, frame, self)
        return _picture(file, self.max_pixels)

    def spacing(self, file: Path) -> tuple[float, float]:
        """Millimetres between columns and between rows of an image, by its header; NaN where that does not say."""
        try:
            if is_nifti(file):
                import nibabel

                image = load_nifti(file)
                upward = nibabel.io_orientation(image.affine)[:, 0].tolist().index(2)  # slices are taken across it
                upward = upward if len(image.shape) > 2 else 2
                zooms = [float(zoom) for axis, zoom in enumerate(image.header.get_zooms()[:3]) if axis != upward]
                return zooms[0], zooms[1]
            if is_dicom(file):
                tags = ["PixelSpacing", "ImagerPixelSpacing"]
                header = read_dicom(file, stop_before_pixels=True, specific_tags=tags)
                found = next((header[tag].value for tag in tags if header.get(tag)), None)
                return (float(found[1]), float(found[0])) if found else UNKNOWN_SPACING
        except Exception:  # a broken header is named where the pixels are read
            pass
        return UNKNOWN_SPACING

    def mask(self, file: Path, frame: int | None = None) -> np.ndarray:
        """[H, W], above zero inside; the values of the file, without windowing."""
        _refuse_missing_or_empty(file)
        if is_nifti(file):
            volume, _ = load_volume(file, self.max_pixels)
            return axial(volume, frame)
        pixels = _picture(file, self.max_pixels)
        return pixels if pixels.ndim == 2 else pixels.max(axis=2)


def is_image_name(file: Path) -> bool:
    """True for an image, by its name or, without a suffix, by its first bytes."""
    if file.name.startswith("."):
        return False
    return _ends(file, (*PICTURES, *DICOM, *NIFTI)) or (not file.suffix and _looks_like_dicom(file))


def is_nifti(file: Path) -> bool:
    """True for a NIfTI volume, by its name."""
    return _ends(file, NIFTI)


def is_dicom(file: Path) -> bool:
    """True for a DICOM image, by its name or its first bytes."""
    return _ends(file, DICOM) or _looks_like_dicom(file)


def is_volume_name(file: Path) -> bool:
    """True for a file that may hold more than one slice."""
    return not _ends(file, PICTURES)


def load_nifti(file: Path) -> Any:
    """A NIfTI image whose voxels are not read; ValueError where what comes before them is larger than any header."""
    import nibabel

    with gzip.open(file) if _ends(file, (".gz",)) else file.open("rb") as stream:
        start = stream.read(540)
        order, second = ("<" if start[:1] in b"\x5c\x1c" else ">"), start[:4] in (b"\x1c\2\0\0", b"\0\0\2\x1c")
        place = struct.unpack_from(f"{order}q", start, 168) if second else struct.unpack_from(f"{order}f", start, 108)
        sizes = [float(place[0])]
        at = 544 if second else 352
        while at + 8 <= min(sizes[0], MOST_HEADER) and sizes[-1] > 0:  # extensions: their length, then their kind
            stream.seek(at)
            sizes.append(struct.unpack(f"{order}i", stream.read(4).ljust(4, b"\0"))[0])
            at += int(sizes[-1])
            if sizes[-1] > MOST_HEADER:
                break
    if not max(sizes) <= MOST_HEADER:
        raise ValueError(f"its header declares {max(sizes):.0f} bytes, above {MOST_HEADER}; export it again")
    return nibabel.load(file)


def read_dicom(file: Path, max_pixels: int = MOST_PIXELS, **options: Any) -> "pydicom.Dataset":
    """What `pydicom.dcmread` reads. A deflated file is inflated no further than any header, and then than the pixels
    that the header declares: a megabyte can become a thousand."""
    import pydicom

    meta = pydicom.filereader.read_file_meta_info(file)
    if meta.get("TransferSyntaxUID") != pydicom.uid.DeflatedExplicitVRLittleEndian:
        return pydicom.dcmread(file, **options)
    start = 144 + meta.FileMetaInformationGroupLength
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    plain = inflater.decompress(file.read_bytes()[start:], MOST_HEADER)

    def opened(**options: Any) -> "tuple[pydicom.Dataset, int]":
        content = io.BytesIO()
        content.write(bytes(128) + b"DICM")
        pydicom.filewriter.write_file_meta_info(content, meta)  # type: ignore[arg-type]
        begins = content.tell()
        content.write(plain)
        content.seek(0)
        return pydicom.dcmread(content, **options), content.tell() - begins

    header, at = opened(stop_before_pixels=True)
    if options.get("stop_before_pixels"):
        return opened(**options)[0]
    if len(plain) < at + 12:
        raise ValueError("the DICOM file holds no image")
    (length,) = struct.unpack_from("<I", plain, at + 8)
    if length > (most := _declared_bytes(header, max_pixels) + 1):
        raise ValueError(f"the file has {length} bytes of pixels where its header declares {most - 1}; export it again")
    if (missing := at + 12 + length - len(plain)) > 0:
        plain += inflater.decompress(inflater.unconsumed_tail, missing)
    plain = plain[: at + 12 + length]
    return opened(**options)[0]


def _declared_bytes(header: "pydicom.Dataset", max_pixels: int) -> int:
    """Bytes of the pixels by what a header declares; ValueError where they are more than the study allows."""
    names = ("NumberOfFrames", "SamplesPerPixel", "BitsAllocated")
    frames, samples, bits = (int(header.get(name) or 1) for name in names)
    check_pixels(int(header.Columns), int(header.Rows), max_pixels, frames * max(1, samples // 3) * max(1, bits // 16))
    return (int(header.Columns) * int(header.Rows) * frames * samples * bits + 7) // 8


def _check_frames(header: "pydicom.Dataset") -> None:
    """ValueError for compressed frames that say themselves that they are larger than the header does, or that have
    more bytes than their pixels: run lengths become 64 times as many."""
    from pydicom.encaps import generate_frames

    if not header.file_meta.TransferSyntaxUID.is_encapsulated:
        return
    frames = int(header.get("NumberOfFrames") or 1)
    most = 2 * _declared_bytes(header, MOST_PIXELS) // frames + LONGEST_TABLES
    for frame in generate_frames(header.PixelData, number_of_frames=frames):
        if len(frame) > most:
            raise ValueError(f"a compressed frame has {len(frame)} bytes, more than its pixels need; export it again")
        try:
            with Image.open(io.BytesIO(frame), formats=("JPEG", "JPEG2000")) as picture:
                check_picture(picture, MOST_PIXELS)
                width, height = picture.size
        except UnidentifiedImageError:  # another compression, or one that no decoder takes either
            continue
        if width * height > int(header.Columns) * int(header.Rows):
            raise ValueError(
                f"a compressed frame has {width} x {height} pixels where the DICOM header declares "
                f"{header.Columns} x {header.Rows}; export it again"
            )


def open_nifti(file: Path) -> Any:
    """A NIfTI image. One of two dimensions is a volume of one axial slice."""
    import nibabel

    image = load_nifti(file)
    if len(image.shape) != 2:
        return image
    is_axial = nibabel.io_orientation(image.affine)[2, 0] == 2
    return nibabel.Nifti1Image(np.asarray(image.dataobj)[..., None], image.affine if is_axial else np.eye(4))


def count_slices(file: Path) -> int:
    """Slices of a volume, from its header; 1 where that is broken, so that reading names the file."""
    import nibabel

    try:
        if is_nifti(file):
            image = load_nifti(file)
            if len(image.shape) == 2:
                return 1
            upward = nibabel.io_orientation(image.affine)[:, 0].tolist().index(2)  # the axis from feet to head
            return int(image.shape[upward])
        return int(read_dicom(file, stop_before_pixels=True).get("NumberOfFrames") or 1)
    except Exception:
        return 1


def window_to_uint8(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Intensities to uint8: `low` and below is 0, `high` and above is 255."""
    if not np.isfinite(values).all():
        raise ValueError("the image holds values that are not numbers")
    scaled = (values.astype(np.float32) - low) / max(high - low, 1e-12)
    return to_uint8(scaled)


def _refuse_missing_or_empty(file: Path) -> None:
    if not file.is_file():
        raise FileNotFoundError("the file does not exist")
    if not file.stat().st_size:
        raise ValueError("the file is empty")


def _ends(file: Path, suffixes: tuple[str, ...]) -> bool:
    return file.name.lower().endswith(suffixes)


def _looks_like_dicom(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return stream.read(132)[128:] == b"DICM"
    except OSError:
        return False


def _picture(file: Path, max_pixels: int) -> np.ndarray:
    with Image.open(file, formats=FORMATS) as opened:
        check_picture(opened, max_pixels)
        ImageOps.exif_transpose(opened, in_place=True)  # a large image lies in memory once
        if opened.mode.startswith(("I", "F")):
            values = np.asarray(opened)
            return window_to_uint8(values, float(values.min()), float(values.max()))
        mode = "L" if opened.mode in ("1", "L", "LA") else "RGB"
        return np.asarray(opened if opened.mode == mode else opened.convert(mode))


def _dicom_frame(file: Path, frame: int | None, reader: Reader) -> np.ndarray:
    import pydicom
    from pydicom.pixels import apply_modality_lut, pixel_array

    try:
        header = read_dicom(file, reader.max_pixels)
    except pydicom.errors.InvalidDicomError:  # its own words advise a setting of Python code
        raise ValueError("this is no DICOM file, or its beginning is damaged; export it again") from None
    if "PixelData" not in header:
        raise ValueError("the DICOM file holds no image")
    _declared_bytes(header, reader.max_pixels)
    _check_frames(header)
    frames = int(header.get("NumberOfFrames") or 1)
    values = pixel_array(header)
    if frames > 1:
        values = values[_index(frame, len(values))]
    if header.get("SamplesPerPixel", 1) > 1:
        return values if values.dtype == np.uint8 else window_to_uint8(values, 0, float(2**header.BitsStored - 1))
    grey = _windowed(apply_modality_lut(values, header), header, reader.window)
    return 255 - grey if header.get("PhotometricInterpretation") == "MONOCHROME1" else grey


def _windowed(values: np.ndarray, header: "pydicom.Dataset", window: Window | None) -> np.ndarray:
    """The study's window, else the file's table or window (its first), else from darkest to brightest."""
    if window is None and header.get("VOILUTSequence"):
        from pydicom.pixels import apply_voi_lut

        values = apply_voi_lut(values, header)
    elif window is None and header.get("WindowWidth") is not None:
        centre, width = (np.atleast_1d(header[tag].value)[0] for tag in ("WindowCenter", "WindowWidth"))
        return _in_window(values, (float(centre), float(width)))
    if window is not None:
        return _in_window(values, window)
    return window_to_uint8(values, float(values.min()), float(values.max()))


def _in_window(values: np.ndarray, window: Window) -> np.ndarray:
    """The linear window of the DICOM standard (PS3.3 C.11.2.1.2): black from c - 0.5 - (w - 1) / 2 down."""
    centre, width = window
    half = max(width - 1, 1e-6) / 2
    return window_to_uint8(values, centre - 0.5 - half, centre - 0.5 + half)


def axial(volume: np.ndarray, frame: int | None) -> np.ndarray:
    """A slice [H, W] of voxels [right, anterior, head] as a radiologist sees it: face up, right on the left."""
    return np.ascontiguousarray(volume[::-1, ::-1, _index(frame, volume.shape[2])].T)


def load_volume(file: Path, max_pixels: int = MOST_PIXELS) -> tuple[np.ndarray, tuple[float, float]]:
    """Voxels [x, y, z], growing to the patient's right, front and head, and the spread of those that are not zero.

    The spread is from their 0.5th to their 99.5th percentile. The last volumes are remembered, as neighbouring slices
    are read one after the other; one thread reads at a time, so that they do not all read the same.
    """
    with _reading_a_volume:
        return _load_volume(file, file.stat().st_mtime_ns, max_pixels)


@lru_cache(maxsize=3)
def _load_volume(file: Path, modified: int, max_pixels: int) -> tuple[np.ndarray, tuple[float, float]]:
    import nibabel

    opened = load_nifti(file)
    sides = (*opened.shape, 1, 1, 1)
    wide = max(1, opened.get_data_dtype().itemsize // 4)
    check_pixels(int(sides[0]), int(sides[1]), max_pixels, math.prod(map(int, sides[2:])) * wide)
    image = open_nifti(file)
    voxels = _voxels(image.dataobj)
    if voxels.ndim != 3:
        raise ValueError(f"the volume has {voxels.ndim} dimensions instead of 3")
    voxels = nibabel.apply_orientation(voxels, nibabel.io_orientation(image.affine))
    inside = voxels[voxels != 0]
    low, high = np.percentile(inside, [0.5, 99.5], overwrite_input=True) if inside.size else (0.0, 1.0)
    return voxels, (float(low), float(high))


def _voxels(data: Any) -> np.ndarray:
    """The numbers of a NIfTI image, slice by slice: nibabel would have all of them as float64 several times."""
    from nibabel.volumeutils import apply_read_scaling

    if isinstance(data, np.ndarray):
        return data.astype(np.float32)
    stored = data.get_unscaled()
    voxels = np.empty(stored.shape, np.float32)
    for at in range(stored.shape[-1]):
        voxels[..., at] = apply_read_scaling(stored[..., at], data.slope, data.inter)
    return voxels


_reading_a_volume = Lock()


def _index(frame: int | None, count: int) -> int:
    if frame is None:
        return count // 2
    if not -count <= frame < count:
        raise IndexError(f"there is no slice {frame}: the volume has {count}")
    return frame
